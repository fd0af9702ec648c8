"""What a run goes on from, and what may not change when it does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from trainers.config import RunConfig
from trainers.recording.provenance import changed_provenance
from trainers.runs.checkpoint import Checkpoint, CheckpointFolder
from trainers.runs.optimizer import build_schedule
from trainers.runs.training_setup import find_device
from trainers.texts.corpus import Corpus
from trajstore.errors import ConfigError, CorpusError, NothingToResume, RunNotFound
from trajstore.store.lock import RunLock
from trajstore.store.object_keys import checkpoint_folder
from trajstore.store.open_group import open_group
from trajstore.store.writer import RunWriter

__all__ = ["check_text", "complete", "find_checkpoint", "notes", "recorded_config"]

_MAY_CHANGE = {"training.steps", "recording.memory", "recording.checkpoint_every"}


def recorded_config(path: str | os.PathLike[str]) -> RunConfig:
    """Configuration that a run was recorded with.

    Raises
    ------
    RunNotFound
        If there is no run.
    NothingToResume
        If it was not recorded from a configuration.

    Examples
    --------
    >>> from trainers import preset, record
    >>> config = preset("gatsby").with_values(["training.steps=2", "training.batch_size=4"])
    >>> recorded_config(record(config, "run.zarr")) == config
    True
    """
    config = _attributes(Path(path)).get("config")
    if not config:
        raise NothingToResume(
            f"{path} was not recorded by `trajstore record`, so it does not say how to go on; "
            "whoever recorded it can, with resume=True"
        )
    return RunConfig.parse(config)


def find_checkpoint(path: Path, config: RunConfig) -> Checkpoint:
    """Checkpoint that a run goes on from.

    Parameters
    ----------
    path : Path
        Of the run.
    config : RunConfig
        That it is to go on with.

    Raises
    ------
    RunNotFound
        If there is no run.
    NothingToResume
        If there is no checkpoint, or nothing left to do.
    ConfigError
        If the configuration has changed where it may not; the message names the field.
    RunLocked
        If another process writes to the run.
    FormatError
        If the checkpoint is damaged.
    """
    recorded = recorded_config(path)
    with RunLock.acquire(path):
        attributes = _attributes(path)
        _check_config(path, recorded, config, attributes.get("provenance", {}))
        rows = attributes.get("committed_rows", 0)
        taken = CheckpointFolder(path).newest(str(attributes.get("created")), rows)
        arrays: Any = open_group(path)
        last = int(arrays["step"][rows - 1]) if rows else 0
    wanted = config.training.steps
    if wanted < last or (wanted == last and attributes["status"] == "complete"):
        raise NothingToResume(
            f"{path} has come to step {last}, and {wanted} are wanted; to extend it, give more: "
            f"--resume --steps {2 * last or 1}"
        )
    if taken is None:
        raise NothingToResume(
            f"{path} has no checkpoint in {checkpoint_folder(path).name} that lies within its "
            f"{rows} committed rows, so it cannot go on; record it anew with --overwrite, and with "
            "--checkpoint-every K so that it can"
        )
    return taken


def complete(path: Path, *, fsync: bool = False) -> None:
    """Mark a run complete that has every step that is wanted, and train no further.

    Its configuration stays that which its rows were made with.

    Parameters
    ----------
    path : Path
        Of the run.
    fsync : bool
        Have that survive a loss of power.

    Raises
    ------
    RunLocked
        If another process writes to the run.
    """
    RunWriter.resume(path, fsync=fsync).close("complete")


def check_text(path: Path, text: Corpus) -> None:
    """Insist on the text and the tokenizer of a run.

    Raises
    ------
    CorpusError
        If either is another one.
    """
    before = _attributes(path).get("provenance", {})
    corpus = before.get("corpus", {})
    if corpus.get("sha256") != text.sha256:
        raise CorpusError(
            f"the corpus {text.name} (sha256 {text.sha256[:12]}…) is not that of {path}, "
            f"{corpus.get('name')} of {corpus.get('bytes')} bytes (sha256 "
            f"{str(corpus.get('sha256'))[:12]}…); give that one with --corpus"
        )
    tokenizer = before.get("tokenizer", {})
    if _identity(tokenizer) != _identity(text.tokenizer):
        raise CorpusError(
            f"the tokenizer {_shown(text.tokenizer)} is not that of {path}, {_shown(tokenizer)}; "
            "give that one with --tokenizer"
        )


def notes(path: Path, config: RunConfig, taken: Checkpoint) -> list[str]:
    """What should be known about a run that goes on: where it is not as if never interrupted."""
    found = []
    before = _attributes(path).get("provenance", {})
    for name, now in changed_provenance(before, find_device(config.training.device)).items():
        found.append(
            f"{name} is {now} now and was {before.get(name)}, so the bits may differ from those of "
            "a run that was never interrupted"
        )
    old = RunConfig.parse(taken.config)
    if config.schedule.name != "constant" and old.decay_steps != config.decay_steps:
        found.append(
            f"the decay of the learning rate ends at step {config.decay_steps} now and not at "
            f"{old.decay_steps}, so the rate jumps at step {taken.step + 1}, from "
            f"{_rate(old, taken.step):.6g} to {_rate(config, taken.step):.6g}; to keep the old "
            f"decay give --set schedule.steps={old.decay_steps}, and for one decay without a seam "
            f"record the first part with --set schedule.steps={config.decay_steps}"
        )
    return found


def _attributes(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise RunNotFound(f"there is no run at {path} to go on with; record it without --resume")
    return open_group(path).attrs.asdict()


def _check_config(
    path: Path, recorded: RunConfig, config: RunConfig, provenance: dict[str, Any]
) -> None:
    before, now = _flat(recorded), _flat(config)
    for field, value in now.items():
        if value == before[field] or field in _MAY_CHANGE or field == "training.device":
            continue
        if field == "schedule.steps" and recorded.decay_steps == config.decay_steps:
            continue
        raise ConfigError(
            f"{field} is {_toml(before[field])} in {path} and {_toml(value)} now; a run that goes "
            f"on keeps it, so leave it out, or record another run"
        )
    device = find_device(config.training.device)
    used = str(provenance.get("device")).partition(":")[0]
    if device.type != used:
        raise ConfigError(
            f"training.device = {config.training.device!r} is {device.type} here, and {path} was "
            f"recorded on {used}; a run that goes on stays there: --device {used}"
        )


def _flat(config: RunConfig) -> dict[str, Any]:
    return {
        f"{section}.{field}": value
        for section, fields in config.model_dump(mode="json").items()
        for field, value in fields.items()
    }


def _toml(value: Any) -> str:
    return "not set" if value is None else str(value)


def _identity(tokenizer: dict[str, str]) -> str | None:
    return tokenizer.get("sha256") or tokenizer.get("name")


def _shown(tokenizer: dict[str, str]) -> str:
    hashed = tokenizer.get("sha256")
    return f"{tokenizer.get('name')}" + (f" (sha256 {hashed[:12]}…)" if hashed else "")


def _rate(config: RunConfig, step: int) -> float:
    """Rate of the optimizer step after `step`."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=config.optimizer.lr)
    schedule = build_schedule(optimizer, config.schedule, config.decay_steps)
    return float(schedule.base_lrs[0] * schedule.lr_lambdas[0](step))

"""A verdict on a recording: true, missing with a note, or wrong, beside the loop's own rows."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trajstore import open_run
from trajstore.trainers import capture, replay

from .loop import PARAMETER, Loop, OwnRow, Situation
from .programs import Program

WORDS = {
    **{name: name for name in ("loss", "clip_coef", "grad_norm", "skipped")},
    "W": r"\bW\b|weights|ended",
    "grad": r"\bgrad\b|gradient",
    "lr": r"\blr\b|rate",
    "settings": "hyperparameters",
    "rows": "further|no row|ended|changed nothing",
}
"""What a note must say if a value is missing. Other values are of the optimizer's state."""
NOT_USED = "(?=.*clip_coef).*scaled"
"""In a note: `grad` is a gradient before the one that the optimizer got."""


@dataclass
class Verdict:
    """What was missing with a note, and what was wrong."""

    situation: Situation
    missing: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def word(self) -> str:
        return "wrong" if self.wrong else "missing" if self.missing else "true"

    def lines(self) -> str:
        """Return two lines: the loop and what was wrong, and the notes."""
        said = " | ".join(note[:90] for note in self.notes)
        return f"{self.situation}: {'; '.join(self.wrong)}\n    notes: {said or 'none'}"


class Comparison:
    """One recorded run beside the rows of the loop. Faults are sentences."""

    def __init__(self, verdict: Verdict, path: Path) -> None:
        self.verdict = verdict
        self.ds = open_run(path, chunks=None).load()
        entries = self.ds.attrs.get("notes", [])
        self.notes = [entry for entry in entries if "have no labels" not in entry["note"]]
        verdict.notes = [entry["note"] for entry in self.notes]

    def is_told(self, pattern: str, step: int | None = None) -> bool:
        return any(
            re.search(pattern, entry["note"])
            and (step is None or entry["first_step"] <= step <= entry["last_step"])
            for entry in self.notes
        )

    def miss(self, name: str, step: int | None = None) -> Iterator[str]:
        """Accept a missing value if a note names it, in that step if other steps have it."""
        self.verdict.missing.add(name)
        pattern = WORDS.get(name, f"{name}|moment|state")
        if not self.is_told(pattern, step if name in self.ds else None):
            yield f"{name} is missing without a note, first in step {step}"

    def value(self, name: str, step: int) -> Any:
        """Return the recorded value of a step; None if there is none."""
        value = np.asarray(self.ds[name].values[step], float) if name in self.ds else np.nan
        return None if np.isnan(value).all() else value

    def faults(self, rows: list[OwnRow]) -> Iterator[str]:
        """Yield the faults of the first wrong step, and the number of rows."""
        count = self.ds.sizes["step"] - 1
        if count < len(rows):
            yield from self.miss("rows")
        if count > len(rows):
            yield f"{count} rows for {len(rows)} steps"
        for step, row in enumerate(rows[:count], 1):
            if found := list(self.faults_of(step, row)):
                yield from found
                break

    def faults_of(self, step: int, row: OwnRow) -> Iterator[str]:
        for name, value in {"W": row.W, **row.state}.items():
            yield from self.differs(name, step, [value])
        yield from self.loss(step, row)
        yield from self.gradient(step, row)
        if row.used is not None:
            yield from self.differs("grad_norm", step, [one.norm for one in row.before], 1e-5)
        if row.rate is not None:
            yield from self.differs("lr", step, [row.rate], 1e-9)
        if row.is_skipped and self.value("skipped", step) != 1:
            yield from self.miss("skipped", step)
        numbers = self.ds.get("hyperparameters")
        for name, true in row.settings.items():
            if numbers is not None and name in numbers.hyperparameter:
                got = float(numbers.sel(hyperparameter=name)[step])
                if np.isnan(got):
                    yield from self.miss("settings", step)
                elif got != true:
                    yield f"{name} of step {step} is {got}, true: {true}"

    def differs(self, name: str, step: int, true: list[Any], rel: float = 0.0) -> Iterator[str]:
        """Yield a fault unless the value is one of the true ones, or missing with a note."""
        got, expected = self.value(name, step), [number(value) for value in true]
        if got is None:
            if not any(np.isnan(value).all() for value in expected):
                yield from self.miss(name, step)
        elif not any(same(got, value, rel) for value in expected):
            shown_true = " or ".join(map(shown, expected)) or "missing"
            yield f"{name} of step {step} is {shown(got)}, true: {shown_true}"

    def loss(self, step: int, row: OwnRow) -> Iterator[str]:
        if faults := list(self.differs("loss", step, row.losses, 1e-5)):
            yield from faults
        elif row.is_sum and self.value("loss", step) is not None and not self.is_told("sum", step):
            yield f"loss of step {step} may be a sum, without a note"

    def gradient(self, step: int, row: OwnRow) -> Iterator[str]:
        """Compare with the gradient that was used, and that before the changes of the loop."""
        before = [one.grad for one in row.before if one.grad is not None]
        if row.at_begin is None:  # the matrix had no gradient
            return
        used = [row.at_begin] + [row.used] * (row.used is not None)
        factor = self.value("clip_coef", step)
        if factor is None:
            if not row.is_skipped:
                yield from self.miss("clip_coef", step)
            if row.is_skipped or self.is_told(NOT_USED, step):
                used += before
            yield from self.differs("grad", step, used, 1e-6)
            return
        yield from self.differs("grad", step, before, 1e-6)
        product = torch.tensor(self.ds.grad.values[step]) * torch.tensor(factor).float()
        if row.used is not None and not same(number(product), number(row.used), 0.0):
            true = shown(number(row.used))
            yield f"grad * clip_coef of step {step} is {shown(number(product))}, true: {true}"


def number(value: Any) -> Any:
    return np.asarray(value.detach() if torch.is_tensor(value) else value, float)


def same(one: Any, other: Any, rel: float) -> bool:
    if rel == 0 or one.shape != other.shape:
        return bool(np.array_equal(one, other, equal_nan=True))
    size = np.max(np.abs(other), initial=1e-30, where=np.isfinite(other))
    return bool(np.allclose(one, other, rtol=rel, atol=rel * size, equal_nan=True))


def shown(value: Any) -> str:
    if np.ndim(value) == 0:
        return f"{float(value):.6g}"
    return f"|{float(np.sqrt(np.nansum(np.square(value)))):.6g}|"


def judged(situation: Situation, folder: Path) -> Verdict:
    """Train without and with a recording; compare the trainings, and the run with the rows."""
    verdict, said, path = Verdict(situation), [], folder / "run.zarr"
    shutil.rmtree(path, ignore_errors=True)
    plain, loop = Program(situation), Program(situation)

    def recording(loop: Loop) -> Any:
        options = {"scaler": loop.scaler} if situation.scaler == "given" else {}
        options |= {"parameter": PARAMETER, "fsync": False, "on_note": said.append}
        return capture(loop.model, loop.optimizer, path, **options | situation.options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of loops that torch calls unusual
        plain.train()
        try:
            loop.train(recording)
        except Exception as error:
            verdict.wrong.append(f"the training ended: {type(error).__name__}: {error}")
            return verdict
    verdict.wrong += differences(plain, loop)
    if not path.exists():
        verdict.missing.add("rows")
        if not any(re.search(WORDS["rows"], note) for note in said):
            verdict.wrong.append("no run and no note")
        return verdict
    comparison = Comparison(verdict, path)
    verdict.wrong += comparison.faults(loop.rows)
    for pattern in dict.fromkeys(loop.owed):
        if not comparison.is_told(pattern):
            verdict.wrong.append(f"no note has the words {pattern}")
    if findings := replay(path).findings:
        verdict.wrong.append(f"{len(findings)} findings of the replay: {findings[0].sentence}")
    return verdict


def differences(plain: Loop, loop: Loop) -> Iterator[str]:
    """Yield what differs between a training and the same one that was recorded."""
    if len(plain.rows) != len(loop.rows):
        yield "the recording changed the number of steps"
    for a, b in zip(plain.rows, loop.rows, strict=False):
        if not all(same(number(getattr(a, x)), number(getattr(b, x)), 0.0) for x in ("W", "used")):
            yield "the recording changed a step"
            break
    ends = ([p for model in one.models for p in model.parameters()] for one in (plain, loop))
    if not all(same(number(a), number(b), 0.0) for a, b in zip(*ends, strict=True)):
        yield "the recording changed the weights at the end"

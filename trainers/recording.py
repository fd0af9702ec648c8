"""`record`: from a configuration to a recorded run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainers.attachment import capture
from trainers.callback import TrajectoryCallback
from trainers.config import RunConfig
from trainers.corpus import Corpus, load_corpus
from trainers.recorder import Recorder
from trainers.tokens import read_tokens, select_tokens
from trainers.training import build_training
from trajstore.writer import check_target

__all__ = ["record"]


def record(
    config: RunConfig,
    path: str | os.PathLike[str],
    *,
    corpus: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    on_corpus: Callable[[Corpus], None] | None = None,
    on_step: Callable[[Recorder], None] | None = None,
) -> Path:
    """Train and record a run.

    Parameters
    ----------
    config : RunConfig
    path : path-like
        Where the run will be, by custom ``NAME.zarr``.
    corpus, tokenizer : path-like, optional
        In place of those that the configuration names, which are taken from the cache where they
        have been fetched, and else embedded.
    overwrite : bool
        Replace a run that is there.
    on_corpus, on_step : callable, optional
        Called with the `Corpus` when it is loaded, and with the `Recorder` after every step.

    Returns
    -------
    Path
        Of the run, complete. When training fails, what is whole is committed as ``interrupted``.

    Raises
    ------
    RunExists
        If something is at `path`.
    CorpusError
        If the text cannot be trained on; nothing has been made.
    ConfigError
        If the device is not there.

    Examples
    --------
    >>> from trainers import PRESETS
    >>> config = PRESETS["gatsby"]().with_values(["training.steps=200"])
    >>> record(config, "gatsby.zarr")                                # doctest: +SKIP
    """
    target = check_target(path, overwrite=overwrite)
    text = load_corpus(config, corpus=corpus, tokenizer=tokenizer)
    if on_corpus is not None:
        on_corpus(text)
    counts = text.counts()
    recording = config.recording
    tokens: Any = recording.tokens
    if tokens not in ("all", "dead", "live"):
        tokens = read_tokens(tokens)
    # Before anything is built: an impossible choice should not cost a minute.
    select_tokens(tokens, config.model.vocab_size, counts == 0)
    training = build_training(config, text)
    options: dict[str, Any] = {
        "record": recording.record,
        "every": recording.every,
        "tokens": tokens,
        "logits_mode": recording.logits_mode,
        "is_dead": counts == 0,
        "token_count": counts,
        "token_text": text.token_text,
        "config": config.model_dump(mode="json"),
        "origin": text.provenance(),
        "memory": recording.memory,
        "block_rows": recording.block_rows,
        "encoding": recording.encoding,
        "overwrite": overwrite,
        "on_step": on_step,
    }
    if config.training.loop == "plain":
        with capture(
            training.model,
            training.optimizer,
            target,
            scaler=training.scaler,
            max_grad_norm=config.training.max_grad_norm,
            **options,
        ):
            training.run()
        return target
    callback = TrajectoryCallback(target, **options)
    try:
        training.run([callback])
    finally:
        callback.close()
    return target

"""The state after a step is that of the straight run, wherever it stands and whatever moves it.

A state stands in a [C]heckpoint, a [K]eyframe, a [R]ow of everything, or nowhere: then [T]raining
from the start reaches it again. A dot is a cell that cannot be; the short tests have those in
capitals, and share few straight runs.

``TRAJSTORE_STATES=4`` tries each cell at up to so many steps instead of one (`make states`).
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
from damage import contents
from safetensors.torch import load_file
from small_trainings import last_checkpoint, same_checkpoints, same_values, small_config, stop_after
from trainings import (
    EVERY,
    STEPS,
    Accumulated,
    Loop,
    Pair,
    Scaled,
    Scheduled,
    same,
)

from trajstore import RunWriter, open_run, verify
from trajstore.trainers import (
    checkout,
    develop_run,
    fork,
    model_at,
    optimizer_state_at,
    prove,
    record,
    recorded_config,
    restore,
    what_if,
)

TABLE = """
                  plain    micro-batches  scaled or autocast  two optimizers
preset   resume   C k r t  c k R t        c K r t             . . . .
preset   fork     c k r T  c k R t        c k r t             . . . .
preset   restore  . k r .  . K r .        . k r .             . . . .
preset   develop  . k . .  . K . .        . k . .             . . . .
preset   prove    . k r .  . k R .        . k r .             . . . .
preset   what-if  c k r T  c k r t        c k r t             . . . .
loop     resume   . K r .  . k R .        . . . .             . K r .
loop     restore  . k r .  . k R .        . K r .             . k r .
loop     develop  . K . .  . k . .        . K . .             . k . .
loop     what-if  . k r t  . k R t        . k r t             . K r t
"""
"""Why the others cannot be: a preset has one optimizer, and no dropout (the loops have). `restore`,
`prove` and `develop` need a state in the run itself; `develop` needs keyframes. Only the program of
a loop has its checkpoints and its scaler, and can fork it, or train it again from the start: there
is no `fork` and no `prove`. A row has no counters of a scaler: a preset's row is of bfloat16."""

SCALED = "scaled or autocast"
SOURCES = {"C": "matrix", "K": "keyframes", "R": "everything", "T": "weights+grads",
           "E": "everything"}  # fmt: skip
"""The tiers of the runs; [E] is everything for comparison, also of float16."""
PRESETS = {
    "plain": ["gatsby"],
    "micro-batches": ["gatsby-adam", "training.accumulation=2", "optimizer.state_dtype=float32",
                      "optimizer.rounding=stochastic"],
    SCALED: ["gatsby-adam", "training.autocast=float16", "model.dtype=float32",
                           "initialization.kind=normal", "initialization.sigma=20",
                           "optimizer.lr=1", "schedule.name=cosine"],
}  # fmt: skip
LOOPS: dict[str, type[Loop]] = {
    "plain": Scheduled, "micro-batches": Accumulated, SCALED: Scaled,
    "two optimizers": Pair,
}  # fmt: skip


DRAWS = int(os.environ.get("TRAJSTORE_STATES", "1"))


def cells() -> list[Any]:
    """The valid cells, each with one step or more; of the short ones, the first."""
    found = []
    for line in TABLE.strip().splitlines()[1:]:
        program, door, *letters = line.split()
        for (column, _), letter in zip(itertools.product(LOOPS, range(4)), letters, strict=True):
            for draw in range(DRAWS if letter != "." else 0):
                marks = [] if letter.isupper() and not draw else [pytest.mark.nightly]
                cell = (program, door, letter.upper(), column, draw)
                found.append(pytest.param(*cell, marks=marks, id="-".join(map(str, cell))))
    return found


class Straight:
    """Straight runs, each trained once, and what torch kept of the loops."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @staticmethod
    def config(column: str, source: str) -> Any:
        variant = PRESETS[column]
        if source == "R" and column == SCALED:
            variant = ["gatsby", "model.dtype=float32"]  # autocast to bfloat16
        small = ["training.batch_size=4", "training.products=native",
                 *["recording.keyframe_every=3", "recording.encoding=compact"] * (source == "K"),
                 ]  # fmt: skip
        return small_config(variant, *small, f"recording.variables={SOURCES[source]}", steps=STEPS)

    @functools.cache  # noqa: B019
    def preset(self, column: str, source: str) -> Path:
        path = self._folder / f"{column}-{source}.zarr"
        return Path(record(self.config(column, source), path))

    @functools.cache  # noqa: B019
    def loop(self, column: str, source: str) -> tuple[Path, list[Any]]:
        path = self._folder / f"loop-{column}-{source}.zarr"
        return path, LOOPS[column]().train(path, variables=SOURCES[source])


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    return Straight(tmp_path_factory.mktemp("straight"))


def same_rows(part: Path, whole: Path, after: int = -1) -> None:
    """Every variable of some rows of a run, or of its keyframes after a step."""
    one, other = (open_run(path, chunks=None) for path in (part, whole))
    steps = np.intersect1d(one.step, other.step)
    steps = steps[steps > after]
    ds, rows = (each.sel(step=steps).load() for each in (one, other))
    names = {*ds.data_vars} & {*rows.data_vars}
    assert "W" in names
    assert len(steps) > 0
    for name in names:
        assert ds[name].values.tobytes() == rows[name].values.tobytes(), name


class Preset:
    """What moves the state of a run of `record`."""

    def __init__(self, straight: Straight, source: str, column: str, folder: Path) -> None:
        self.whole, self.folder = straight.preset(column, source), folder
        self.config, self.source = straight.config(column, source), source
        self.everything = self.whole
        if source == "K":
            self.everything = straight.preset(column, "E" if column == SCALED else "R")

    def stopped(self, step: int) -> Path:
        """The run until a step, with the state in its source and nowhere else."""
        path = self.folder / "run.zarr"
        if self.source == "C":
            record(self.config, path, stop=stop_after(step))
        else:
            shutil.copytree(self.whole, path)
            RunWriter.resume(path, rows=step + 1).close("interrupted")
        return path

    def same(self, path: Path, after: int = -1) -> None:
        same_values(self.whole, path)
        if self.source == "K":
            same_rows(path / "keyframes", self.whole / "keyframes", after)
        if self.source in "CT":
            same_checkpoints(path, self.whole)
            assert last_checkpoint(path).config == last_checkpoint(self.whole).config
        assert verify(path).clean

    def resume(self, step: int) -> None:
        path = self.stopped(step)
        self.same(Path(record(recorded_config(path), path, resume=True)))
        (entry,) = open_run(path).attrs["provenance"]["resumed"]
        assert entry["step"] == (step // EVERY * EVERY if self.source == "K" else step)
        assert path.with_suffix(".ckpt").exists() == (self.source in "CT")

    def fork(self, step: int) -> None:
        source = self.stopped(step) if self.source == "C" else self.folder / "copy.zarr"
        if self.source != "C":
            shutil.copytree(self.whole, source)
        notes: list[str] = []
        other = fork(source, self.folder / "fork.zarr", at=step, on_note=notes.append)
        self.same(other, after=step)  # it has a keyframe, without a gradient, where it begins
        again = any("again" in note or "differs" in note for note in notes)
        assert again == (self.source == "T" or (self.source == "K" and step % EVERY > 0))

    def restore(self, step: int) -> None:
        """In memory and in a folder."""
        before = contents(self.whole)
        model, state = model_at(self.whole, step), optimizer_state_at(self.whole, step)
        expected = model_at(self.everything, step)
        assert same(dict(model.state_dict()), dict(expected.state_dict()))
        assert same(state, optimizer_state_at(self.everything, step))
        to = checkout(self.whole, self.folder / "step", step=step, optimizer=True).path
        assert same(torch.load(to / "optimizer.pt"), state)
        weights = load_file(to / "model.safetensors")
        assert same(weights, {name: model.state_dict()[name] for name in weights})
        assert contents(self.whole) == before
        matrix = open_run(self.whole).W.sel(step=step).values
        assert (model.get_input_embeddings().weight.detach().float().numpy() == matrix).all()

    def develop(self, step: int) -> None:
        part, trained = self.folder / "part.zarr", []
        done = develop_run(self.whole, part, steps=slice(step, step + 3),
                           on_retrain=lambda at, last: trained.append(at))  # fmt: skip
        assert (done.difference, done.steps) == (None, len(range(step, min(step + 3, STEPS + 1))))
        assert done.keyframe == trained[0] - 1 == max(step - 1, 0) // EVERY * EVERY
        entry = open_run(part).attrs["provenance"]["developed"]
        assert (entry["run"], entry["keyframe"]) == (str(self.whole), done.keyframe)
        assert entry["difference"] is None
        assert verify(part).clean
        same_rows(part, self.whole)
        same_rows(part, self.everything)

    def prove(self, step: int) -> None:
        found = prove(self.whole, steps=slice(step, step + 3))
        assert (found.clean, found.proven, found.unproven) == (True, found.steps, ())
        digests = {"params_digest", "step_digest"} if self.source == "K" else {"params"}
        assert {"W", "loss", *digests} <= {*found.variables}

    def what_if(self, step: int) -> None:
        at = None if self.source == "T" else step
        same_rows(Path(what_if(self.whole, self.folder / "other.zarr", at=at).path), self.whole)


class Program:
    """What moves the state of a loop."""

    def __init__(self, straight: Straight, source: str, column: str, folder: Path) -> None:
        self.whole, self.states = straight.loop(column, source)
        self.make, self.folder, self.source = LOOPS[column], folder, source

    def held(self, step: int) -> int:
        """The newest step until there that the run holds."""
        return step // EVERY * EVERY if self.source == "K" else step

    def resume(self, step: int) -> None:
        path = Path(shutil.copytree(self.whole, self.folder / "run.zarr"))
        lost = self.source == "K" and step % 2 == 1
        if lost:  # a kill can leave keyframes of steps whose rows are lost
            RunWriter.resume(path, rows=self.held(step) + 2).close("interrupted")
        loop = self.make()
        at = None if lost else self.held(step)
        first = restore(path, loop.model, loop.optimizers, step=at)
        assert first == self.held(step)
        loop.train(path, first, resume=True, variables=SOURCES[self.source])
        assert same(loop.state(), self.states[-1])
        same_values(self.whole, path)
        if self.source == "K":
            same_rows(path / "keyframes", self.whole / "keyframes")
        assert verify(path).clean

    def restore(self, step: int) -> None:
        step = self.held(step)
        loop, (model, states) = self.make(), self.states[step]
        several = isinstance(loop.optimizers, tuple)
        given = loop.optimizers[::-1] if several else loop.optimizers  # in any order
        assert restore(self.whole, loop.model, given, step=step) == step
        assert same(loop.state(), self.states[step])
        built = model_at(self.whole, step, constructor=lambda: self.make().model)
        assert same(dict(built.state_dict()), model)
        held = optimizer_state_at(self.whole, step)
        assert same([one["state"] for one in (held if several else [held])], states)
        made = checkout(self.whole, self.folder / "step", step=step, optimizer=True,
                        constructor=lambda: self.make().model)  # fmt: skip
        saved = torch.load(made.path / "optimizer.pt")
        assert same(saved, held)
        if several:
            for optimizer, one in zip(loop.optimizers, saved, strict=True):
                optimizer.load_state_dict(one)

    def develop(self, step: int) -> None:
        loop = self.make()
        done = loop.develop(self.whole, step)
        # A loop that draws numbers cannot begin at its last keyframe: no row has the next ones.
        ends = step == STEPS and not isinstance(loop, Accumulated)
        assert (done.keyframe, done.difference) == (STEPS if ends else self.held(step), None)
        assert same(loop.state(), self.states[step])

    def what_if(self, step: int) -> None:
        at = None if self.source == "T" else step
        same_rows(Path(what_if(self.whole, self.folder / "other.zarr", at=at).path), self.whole)


@pytest.mark.parametrize(("program", "door", "source", "column", "draw"), cells())
def test_a_state_is_that_of_the_straight_run(
    program: str, door: str, source: str, column: str, draw: int, straight: Straight, tmp_path: Path
) -> None:
    # Of float16, 1, 4 and 5 are skipped; a run that stops before a step is taken does not exist.
    steps: Sequence[int] = range(1 + (column == SCALED and door == "resume"), STEPS - 1)
    if door == "develop" and column != SCALED:
        steps = (4, STEPS)
    step = random.Random(f"{program}{door}{source}{column}{draw}").choice(steps)
    kind: Callable[..., Any] = Preset if program == "preset" else Program
    getattr(kind(straight, source, column, tmp_path), door.replace("-", "_"))(step)

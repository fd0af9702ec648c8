"""The command `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trajstore.analysis.commands.analyze import (
    OF_WHOLE_RUN,
    PARAMETER,
    UNCHANGED,
    VECTORS,
    WITHIN,
    of_parameter,
)
from trajstore.cli.command_options import (
    COMMON_STEPS,
    LATTICE,
    POPULATIONS,
    SELECT,
    Choice,
    file_stem,
    given_populations,
    opened,
    runs_and_names,
    without_none,
)
from trajstore.cli.output import AnalysisProgress, StepsProgress, out, print_notes
from trajstore.errors import FormatError, InvalidArgument
from trajstore.schema import EVALUATION

if TYPE_CHECKING:
    import xarray as xr


def _opened(paths: Sequence[str], common_steps: bool) -> list[xr.Dataset]:
    """Open runs, or the stores of evaluations."""
    from trajstore.analysis.several_runs import each_run
    from trajstore.store.reading.open_run import open_run

    if _is_evaluation(paths[0]):
        if common_steps:
            raise InvalidArgument(
                "--common-steps is for runs, got the store of an evaluation; leave it out"
            )
        return [_evaluation(path) for path in paths]
    if common_steps and len(paths) > 1:
        return each_run(opened(paths, common_steps=True))
    return [*map(open_run, paths)]  # they may have different steps


def _is_evaluation(path: str) -> bool:
    from trajstore.store.storage.remote_path import METADATA_KEY

    metadata = Path(path, METADATA_KEY)
    return metadata.is_file() and f'"{EVALUATION}"'.encode() in metadata.read_bytes()


def _evaluation(path: str) -> xr.Dataset:
    import xarray as xr

    if not _is_evaluation(path):
        raise FormatError(f"{path} is not the store of an evaluation; plot runs separately")
    try:
        ds: xr.Dataset = xr.open_zarr(path)
    except Exception as error:  # zarr and xarray raise many types for a damaged store
        raise FormatError(f"{path} cannot be read: {error}; evaluate again") from error
    return ds


def _is_film(kinds: Sequence[str], runs: Sequence[xr.Dataset], frames: str | None) -> bool:
    """True for the film, which is drawn alone and of one run."""
    if "film" not in kinds:
        if frames is not None:
            raise InvalidArgument(f"--frames is for film, got {', '.join(kinds)}; leave it out")
        return False
    if {*kinds} != {"film"}:
        raise InvalidArgument(
            f"film is drawn alone, got {', '.join(kinds)}; draw the others with a second command"
        )
    if len(runs) > 1:
        raise InvalidArgument(f"film shows one run, got {len(runs)}; draw a film of each")
    return True


def _american(word: str) -> str:
    """The option name in American spelling."""
    return "color" if word == "colour" else word


@click.command(context_settings={"token_normalize_func": _american})
@click.argument("words", nargs=-1, required=True, metavar="RUN... KIND...")
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    help="File to write: .png, .svg or .pdf; default: RUN-KIND.png, or RUN-figures.png for several "
    "kinds. Of the film: .gif (default), .webp or .mp4, a folder for its frames, or .png, .svg or "
    ".pdf for the last one.",
)
@SELECT("step", "token", "row", "population", "parameter", "metric", note=OF_WHOLE_RUN)
@WITHIN
@POPULATIONS
@UNCHANGED
@PARAMETER
@VECTORS
@LATTICE
@click.option(
    "--color",
    type=Choice(("regime", "hop")),
    default="regime",
    help="Colors of the heatmap: regime, or mean hop.",
)
@click.option(
    "--plane",
    type=Choice(("principal", "hidden_mean")),
    default="principal",
    help="Projection plane of the trajectory; axis of the sky: centroid, or hidden_mean.",
)
@COMMON_STEPS
@click.option(
    "--style",
    type=Choice(("light", "dark")),
    default="light",
    help="Dark ink on white, or light ink on black.",
)
@click.option(
    "--frames",
    metavar="N|even:N",
    help="Number of frames of the film, chosen by motion, or at equal numbers of steps; default: "
    "120.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
def plot(
    words: tuple[str, ...],
    output: str | None,
    selected: dict[str, Any],
    populations: tuple[str, ...],
    parameter: str | None,
    vectors: str | None,
    common_steps: bool,
    style: str,
    overwrite: bool,
    frames: str | None,
    **given: Any,
) -> None:
    """Draw figures of a run. Several kinds, or `all`, share one sheet. Works during recording.

    With several runs, each run has a line, labeled with the settings that differ. With more than
    eight runs, those that differ only in their seeds are shown as mean and spread. Kinds without
    lines show each run in its own panel.

    Kinds: loss, grad_norms, displacement, speed, freeze, last_motion, lifecycle, regimes,
    freeze_cause, lattice_displacement, heatmap, bulk_thermal, speed_density, centroid, trajectory,
    spectrum, autocorrelation, moments, moment_sizes, moment_tracks, sky, clusters, logit_stats,
    param_update_lost, layers, discontinuities; for several runs also divergence. `film` moves, and
    is drawn alone. For the results of `evaluate`: the names of the results.

    \b
    Example:
      trajstore plot gatsby.zarr grad_norms
      trajstore plot gatsby.zarr freeze last_motion freeze_cause -o freeze.pdf
      trajstore plot gatsby.zarr all --style dark
      trajstore plot gatsby.zarr other.zarr displacement --select step=0:500 -o both.svg
      trajstore plot gatsby.zarr autocorrelation --vectors hidden_mean -o mean.png
      trajstore plot whole.zarr heatmap --parameter transformer.wpe.weight -o positions.png
      trajstore plot runs/*.zarr grad_norms --select population=dead -o dead.png
      trajstore plot whole.zarr layers --select metric=grad:rms --select 'parameter=*.c_fc.*'
      trajstore plot gatsby.zarr grad_norms --population 'rare=token_count < 10' -o rare.png
      trajstore plot loss.zarr text_loss
      trajstore plot gatsby.zarr film -o film.gif
    """
    from trajstore.analysis.figures.figure import Options, check_matplotlib
    from trajstore.analysis.figures.film import FILM, check_film_target, film, save_film
    from trajstore.analysis.figures.sheet import (
        FIGURES,
        check_target,
        collect,
        draw_sheet,
        figures_named,
        figures_of,
        save,
    )
    from trajstore.analysis.motion.vectors import vectors_named
    from trajstore.exchange.selection import select_part
    from trajstore.populations import with_populations
    from trajstore.store.reading.run_info import run_paths
    from trajstore.store.storage.remote_path import local_path

    check_matplotlib()
    paths, kinds = runs_and_names(words, {*FIGURES, "all", "film"})
    patterns, paths = paths, run_paths(paths)
    runs = _opened(paths, common_steps)
    moves = _is_film(kinds, runs, frames)
    figures = [FILM] if moves else figures_named(kinds, len(runs), figures_of(runs[0]))
    stem = file_stem(patterns, paths)
    name = figures[0].name if len(figures) == 1 else "figures"
    target = local_path(output or f"{stem}-{name}.{'gif' if moves else 'png'}")
    (check_film_target if moves else check_target)(target, overwrite=overwrite)
    named = given_populations(populations)
    tokens = selected.pop("tokens", None)
    options = Options(also=[*named], **without_none(given), **selected)
    if "all" not in kinds:
        for figure in figures:
            figure.check(options)
    runs = [with_populations(of_parameter(run, parameter), named) for run in runs]
    runs = [vectors_named(select_part(run, tokens=tokens), vectors) for run in runs]
    if moves:
        drawing = without_none({"style": style, "frames": frames})
        with AnalysisProgress() as progress:
            moving = film(runs[0], **drawing, **vars(options), report=progress.show)
        with StepsProgress("Writing", "frame") as written:
            save_film(moving, target, overwrite=overwrite, report=written.show)
        out.print(f"Wrote {target}: film.")
        return
    with AnalysisProgress() as progress:
        collected = collect(
            runs,
            figures,
            options,
            leave_out="all" in kinds,
            report=progress.show,
        )
    save(draw_sheet(collected, style=style), target, overwrite=overwrite)
    out.print(f"Wrote {target}: {', '.join(figure.name for figure in collected.figures)}.")
    print_notes(f"{name} is left out: " + why for name, why in collected.left_out.items())

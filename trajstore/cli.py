"""The command line: each command opens a library object, calls one method, prints the result.

torch, and the packages that need it, are imported inside the commands that train.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec

import click
from rich.text import Text

from trajstore.console import (
    err,
    out,
    print_comparison,
    print_description,
    print_information,
    print_json,
    print_notes,
    print_plan,
    print_repair,
    print_replay,
    print_summary,
    print_verification,
)
from trajstore.encoding import ENCODINGS
from trajstore.errors import InvalidArgument, MissingExtra, TrajstoreError
from trajstore.layout import format_bytes
from trajstore.progress import (
    AnalysisProgress,
    BytesProgress,
    RecordingProgress,
    StepsProgress,
    stopped_by_signals,
)
from trajstore.signals import StopRequest
from trajstore.version import __version__

__all__ = ["main"]

P = ParamSpec("P")


def _sentences(command: Callable[P, None]) -> Callable[P, None]:
    """Turn the errors that are meant for people into one sentence and an exit code."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except TrajstoreError as error:
            if click.get_current_context().find_root().params["debug"]:
                raise
            _fail(str(error), error.exit_code)
        except OSError as error:
            if click.get_current_context().find_root().params["debug"]:
                raise
            where = f" {error.filename}" if error.filename else ""
            _fail(f"the system refused{where}: {error.strerror or error}", 1)

    return wrapped


def _fail(sentence: str, code: int) -> None:
    err.print(Text(f"trajstore: {sentence}"))
    sys.exit(code)


_RUN = click.argument("run", type=click.Path())
_JSON = click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="trajstore")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def main(debug: bool) -> None:
    """Record every optimizer step of a training run, and look into it.

    \b
    Example:
      trajstore record --preset gatsby --steps 300 -o gatsby.zarr
      trajstore summary gatsby.zarr
    """


def _configuration(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that make a configuration, the same for all commands that take one."""
    options = (
        click.option("--preset", "preset_name", metavar="NAME", help="One of `trajstore presets`."),
        click.option(
            "--config",
            "config_file",
            type=click.Path(dir_okay=False),
            help="A TOML file instead of a preset, as `trajstore presets NAME` prints it.",
        ),
        click.option(
            "--set",
            "assignments",
            multiple=True,
            metavar="SECTION.KEY=VALUE",
            help="Change one field of the configuration, such as optimizer.lr=3e-4. Repeatable.",
        ),
        click.option("--steps", type=int, help="Optimizer steps to train."),
        click.option(
            "--corpus", type=click.Path(), help="A text; default: as fetched, or embedded."
        ),
        click.option(
            "--tokenizer",
            type=click.Path(),
            help="Folder of a tokenizer; default: as fetched, or none.",
        ),
        click.option(
            "--record",
            "variables",
            metavar="W,grad,…",
            help="Variables, or a tier: weights, weights+grads, all.",
        ),
        click.option("--every", type=int, metavar="K", help="Steps from one row to the next."),
        click.option("--tokens", metavar="all|dead|live|FILE", help="Which tokens to record."),
        click.option(
            "--memory", metavar="SIZE", help="For all buffers of the recorder, such as 512MiB."
        ),
        click.option(
            "--block-rows", type=int, help="Rows of a block; default: planned from the memory."
        ),
        click.option(
            "--encoding",
            type=click.Choice(ENCODINGS),
            help="delta (default): smaller, faster; portable: for any reader of Zarr v3.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


_PLACES = {
    "steps": "training.steps",
    "device": "training.device",
    "seed": "training.seed",
    "every": "recording.every",
    "tokens": "recording.tokens",
    "memory": "recording.memory",
    "block_rows": "recording.block_rows",
    "encoding": "recording.encoding",
    "checkpoint_every": "recording.checkpoint_every",
}


def _configured(
    preset_name: str | None,
    config_file: str | None,
    assignments: tuple[str, ...],
    variables: str | None,
    fields: dict[str, Any],
    run: Path | None = None,
) -> Any:
    """Configuration that is asked for; of a run that goes on, where none is named, its own.

    The steps of a preset or a file are those of a new run: one that goes on keeps its own.
    """
    import trainers

    recorded = None if run is None else trainers.recorded_config(run)
    if preset_name is None and config_file is None and recorded is not None:
        config = recorded
    elif (preset_name is None) == (config_file is None):
        raise InvalidArgument("name either a preset (--preset gatsby) or a file (--config FILE)")
    elif preset_name is not None:
        config = trainers.preset(preset_name)
    else:
        config = trainers.RunConfig.from_toml(str(config_file))
    if recorded is not None:
        config = config.with_values([f"training.steps={recorded.training.steps}"])
    given = [
        f"{_PLACES[name]}={json.dumps(value)}"
        for name, value in fields.items()
        if value is not None
    ]
    if variables is not None:
        given.append(f"recording.record={json.dumps(variables.split(','))}")
    return config.with_values([*assignments, *given])


@main.command()
@_configuration
@click.option("-o", "--output", type=click.Path(), help="The run, by default NAME.zarr.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda", "mps"]), help="Where to train.")
@click.option("--seed", type=int, help="Of everything random.")
@click.option(
    "--checkpoint-every",
    type=int,
    metavar="K",
    help="Steps between checkpoints, rounded up to whole blocks; default: only the last step.",
)
@click.option("--resume", is_flag=True, help="Go on with a run, also with more --steps.")
@click.option("--overwrite", is_flag=True, help="Replace a run that is there.")
@click.option("--fsync", is_flag=True, help="Have every commit survive a loss of power.")
@_JSON
@_sentences
def record(
    preset_name: str | None,
    config_file: str | None,
    assignments: tuple[str, ...],
    output: str | None,
    corpus: str | None,
    tokenizer: str | None,
    variables: str | None,
    resume: bool,
    overwrite: bool,
    fsync: bool,
    as_json: bool,
    **fields: Any,
) -> None:
    """Train a model and record every optimizer step.

    Ctrl-C and SIGTERM stop it after the step in progress, so that --resume can go on.

    \b
    Example:
      trajstore record --preset gatsby --steps 300 -o gatsby.zarr
      trajstore record --preset gatsby --corpus book.txt --set optimizer.lr=3e-4
      trajstore record --preset wordybird-1b --every 10 --tokens dead
      trajstore record --preset gatsby --checkpoint-every 500 -o long.zarr
      trajstore record --resume --steps 20000 -o long.zarr
    """
    import trainers

    if resume and output is None and preset_name is None and config_file is None:
        raise InvalidArgument("name the run to go on with: --resume -o RUN.zarr")
    path = Path(output or f"{preset_name or Path(str(config_file)).stem}.zarr")
    config = _configured(
        preset_name, config_file, assignments, variables, fields, path if resume else None
    )

    with StopRequest() as stop, RecordingProgress(config.training.steps) as progress:

        def begin(text: Any) -> None:
            progress.show_corpus(text)
            stop.begin()

        try:
            trainers.record(
                config,
                path,
                corpus=corpus,
                tokenizer=tokenizer,
                overwrite=overwrite,
                resume=resume,
                fsync=fsync,
                stop=stop,
                on_corpus=begin,
                on_step=progress.show_step,
                on_note=progress.show_note,
            )
        except SystemExit:
            left = f"{path} is as it was" if resume else "nothing has been recorded"
            err.print(Text(f"Stopped before the training began; {left}."))
            raise
    facts = _facts(path)
    if as_json:
        print_json(facts)
    if facts["status"] == "interrupted":
        again = f"trajstore record --resume -o {shlex.quote(str(path))}{' --fsync' * fsync}"
        err.print(
            Text(
                f"Interrupted after step {facts['steps']['last']}; "
                f"{facts['committed_rows']} rows are whole. Go on with: {again}"
            )
        )
        sys.exit(stop.exit_code)
    if not as_json:
        out.print(
            f"Recorded {facts['committed_rows']} rows to {path}: "
            f"{format_bytes(facts['bytes_native'])} in {format_bytes(facts['bytes_on_disk'])} "
            f"on disk (ratio {facts['ratio']:.2f})."
        )
        out.print(f"Look at it with: trajstore summary {path}")


@main.command()
@_configuration
@_JSON
@_sentences
def plan(
    preset_name: str | None,
    config_file: str | None,
    assignments: tuple[str, ...],
    corpus: str | None,
    tokenizer: str | None,
    variables: str | None,
    as_json: bool,
    **fields: Any,
) -> None:
    """Tell what a run will cost before it is made: rows, chunks, bytes, memory, files.

    \b
    Example:
      trajstore plan --preset wordybird-1b
    """
    import trainers
    from trajstore.schema import TIERS

    config = _configured(preset_name, config_file, assignments, variables, fields)
    wanted = trainers.plan(config, corpus=corpus, tokenizer=tokenizer)
    tiers = {}
    for tier in TIERS:
        recording = config.recording.model_copy(update={"record": (tier,)})
        alternative = config.model_copy(update={"recording": recording})
        tiers[tier] = trainers.plan(alternative, corpus=corpus, tokenizer=tokenizer)
    facts = wanted.facts() | {"tiers": {tier: made.totals() for tier, made in tiers.items()}}
    if as_json:
        print_json(facts)
    else:
        print_plan(facts)


@main.command()
@click.argument("name", metavar="gatsby|fineweb|gpt2")
@click.option("--source", help="Another place: an address, a data set, or a local path.")
@click.option("--sha256", metavar="HEX", help="What the result must have.")
@_JSON
@_sentences
def fetch(name: str, source: str | None, sha256: str | None, as_json: bool) -> None:
    """Download a corpus or tokenizer into the cache, where `record` finds it.

    \b
    Example:
      trajstore fetch gpt2
    """
    import trainers

    fetched = trainers.fetch(name, source=source, sha256=sha256)
    if as_json:
        print_json({**vars(fetched), "path": str(fetched.path)})
    else:
        unit = "tokens" if fetched.path.is_dir() else "bytes"
        out.print(
            f"Fetched {fetched.path}: {fetched.size:,} {unit} from {fetched.source}, "
            f"sha256 {fetched.sha256}"
        )


@main.command()
@click.argument("name", required=False)
@_JSON
@_sentences
def presets(name: str | None, as_json: bool) -> None:
    """List the presets, or print one as TOML that `record --config` takes.

    \b
    Example:
      trajstore presets gatsby > mine.toml
    """
    import trainers

    if name is not None:
        config = trainers.preset(name)
        if as_json:
            print_json(config.model_dump(mode="json"))
        else:
            click.echo(config.to_toml(), nl=False)
        return
    listed = {key: (make.__doc__ or "").strip() for key, make in trainers.PRESETS.items()}
    if as_json:
        print_json(listed)
    else:
        for key, text in listed.items():
            out.print(Text(f"{key}  {text}"))


def _facts(path: str | Path) -> dict[str, Any]:
    from trajstore.information import information

    return information(path)


@main.command()
@_RUN
@_JSON
@_sentences
def info(run: str, as_json: bool) -> None:
    """Tell what a run is: rows, arrays, sizes, configuration, origin. Also while it is recorded.

    \b
    Example:
      trajstore info gatsby.zarr
    """
    facts = _facts(run)
    if as_json:
        print_json(facts)
        return
    print_information(run, facts)


@main.command()
@_RUN
@_JSON
@_sentences
def summary(run: str, as_json: bool) -> None:
    """Print the tables of the notebooks: gradients, displacement, centroid, logits, loss.

    \b
    Example:
      trajstore summary gatsby.zarr
    """
    import analysis
    from trajstore.reader import open_run

    ds = open_run(run)
    facts = analysis.summary(ds).compute()
    if as_json:
        print_json(
            {
                name: {"dims": list(da.dims), "values": da.values.tolist()}
                for name, da in facts.variables.items()
            }
        )
        return
    print_summary(facts, ds)


@main.command()
@_RUN
@click.argument("quantities", nargs=-1, required=True, metavar="QUANTITY…")
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    help="What to write, streamed: .nc, .zarr, or .csv (a file for each set of dimensions).",
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="NAME=VALUE",
    help="An option of a single quantity, such as since=previous. Repeatable.",
)
@click.option("--by-population", is_flag=True, help="Statistics over dead, live and all tokens.")
@click.option("--scheduler", metavar="ADDRESS", help="A dask cluster to compute on.")
@click.option("--overwrite", is_flag=True, help="Replace a file that is there.")
@_JSON
@_sentences
def analyze(
    run: str,
    quantities: tuple[str, ...],
    output: str | None,
    assignments: tuple[str, ...],
    by_population: bool,
    scheduler: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Compute quantities of a run in one pass, and write them or tell what they are like.

    \b
    Example:
      trajstore analyze gatsby.zarr freeze
      trajstore analyze gatsby.zarr grad_norms --by-population -o grad_norms.csv
      trajstore analyze gatsby.zarr displacement --set since=previous -o steps.nc
      trajstore analyze gatsby.zarr grad_norms freeze regimes -o motion.zarr
    """
    import analysis
    from trajstore.reader import open_run
    from trajstore.results import describe, write_result

    result = analysis.answer(open_run(run), quantities, assignments, by_population=by_population)
    with AnalysisProgress(scheduler) as progress:
        if output is not None:
            files = write_result(result, output, overwrite=overwrite, report=progress.show)
        else:
            files = []
            facts = describe(result, report=progress.show)
    if output is None and as_json:
        print_json(facts)
    elif output is None:
        print_description(facts)
    elif as_json:
        print_json({"files": [str(file) for file in files], "variables": [*map(str, result)]})
    else:
        out.print(Text(f"Wrote {', '.join(map(str, files))}: {', '.join(map(str, result))}."))


@main.command()
@_RUN
@click.option(
    "--format",
    "format_name",
    help="safetensors, hdf5 or zarr; default: as the ending of the output says, or safetensors.",
)
@click.option(
    "--layout",
    default="native",
    show_default=True,
    help="native, or the notebook whose scripts are to read it: 14.1a, 15.1a, 1.12a, 1.12f.",
)
@click.option("-o", "--output", type=click.Path(), required=True, help="The file to write.")
@click.option(
    "--steps", metavar="STEPS", help="Step numbers: 0:200:10 (200 not included), 5,10,20:."
)
@click.option("--tokens", metavar="TOKENS", help="all, dead, live, ids such as 1,2,3, or a FILE.")
@click.option("--vars", "variables", metavar="W,grad,…", help="Variables; default: all.")
@click.option("--block-rows", type=int, help="Rows of a block of zarr; default: planned.")
@click.option("--encoding", default="portable", show_default=True, help="Of zarr.")
@click.option(
    "--memory", default="1GiB", show_default=True, metavar="SIZE", help="For the buffers of zarr."
)
@click.option("--overwrite", is_flag=True, help="Replace what is there.")
@_JSON
@_sentences
def export(run: str, format_name: str | None, output: str, as_json: bool, **options: Any) -> None:
    """Write a run, or part of it, for other programs. Memory stays flat, whatever the size.

    \b
    Example:
      trajstore export gatsby.zarr --format safetensors --layout 15.1a -o gatsby.safetensors
      trajstore export gatsby.zarr --format hdf5 --steps 0:1000:10 --tokens dead -o dead.h5
      trajstore export gatsby.zarr --format zarr --block-rows 64 -o portable.zarr
    """
    from trajstore.export import export as write

    endings = {".h5": "hdf5", ".hdf5": "hdf5", ".zarr": "zarr"}
    format_name = format_name or endings.get(Path(output).suffix, "safetensors")
    with stopped_by_signals(), BytesProgress("exporting") as progress:
        done = write(run, output, format=format_name, on_progress=progress.show, **options)
    if as_json:
        print_json(dataclasses.asdict(done) | {"path": str(done.path)})
        return
    what = f"layout {done.layout}" if format_name == "safetensors" else format_name
    out.print(
        f"Wrote {done.path}: {format_bytes(done.bytes)}, {what}, {done.rows} rows, "
        f"{done.tokens} tokens."
    )
    print_notes(done.notes)


@main.command(name="import")
@click.argument("file", type=click.Path())
@click.option("-o", "--output", type=click.Path(), required=True, help="The run to make.")
@click.option("--layout", help="native, 14.1a, 15.1a, 1.12a, 1.12f, hdf5; default: recognised.")
@click.option(
    "--masks",
    type=click.Path(),
    help="A safetensors file with untrained_mask or untrained_indices, where FILE tells no dead "
    "tokens.",
)
@click.option("--encoding", help="Of the run; default: as it is recorded.")
@click.option("--block-rows", type=int, help="Rows of a block; default: planned from the memory.")
@click.option(
    "--memory", default="448MiB", show_default=True, metavar="SIZE", help="For all buffers."
)
@click.option("--overwrite", is_flag=True, help="Replace a run that is there.")
@_JSON
@_sentences
def import_(file: str, output: str, as_json: bool, **options: Any) -> None:
    """Make a run of a safetensors or HDF5 file.

    \b
    Example:
      trajstore import comprehensive_training_data.safetensors -o gatsby.zarr
      trajstore import wordybird.safetensors --masks fineweb_token_masks.safetensors -o w.zarr
    """
    from trajstore.importing import import_file

    with stopped_by_signals(), BytesProgress("importing") as progress:
        done = import_file(file, output, on_progress=progress.show, **options)
    if as_json:
        print_json(dataclasses.asdict(done) | {"path": str(done.path)})
        return
    held = ", ".join(f"{name} ({dtype})" for name, dtype in done.variables.items())
    out.print(
        f"Imported {done.path}: {done.rows} rows, steps {done.first_step} to {done.last_step}, "
        f"{done.tokens} tokens, {held}; read as layout {done.layout}."
    )
    print_notes(done.notes)


@main.command()
@_RUN
@click.argument("other", type=click.Path())
@_JSON
@_sentences
def compare(run: str, other: str, as_json: bool) -> None:
    """Tell at which step two runs first differ in any bit, in what, and how far they go apart.

    Exits with 0 also when they differ; scripts read that from --json.

    \b
    Example:
      trajstore compare straight.zarr resumed.zarr
    """
    import analysis
    from trajstore.reader import open_run

    first, second = open_run(run), open_run(other)
    found = analysis.compare(first, second).compute()
    facts = {
        "steps": {"common": found.sizes["step"], "first": first.sizes["step"],
                  "second": second.sizes["step"]},
        "differing_settings": found.attrs["differing_settings"],
        "only_first": [str(name) for name in first.data_vars if name not in second.data_vars],
        "only_second": [str(name) for name in second.data_vars if name not in first.data_vars],
        "variables": {
            str(name): {
                "first_difference": int(found.first_difference[at]),
                "differing_steps": int(found.differs[:, at].sum()),
                "distance": found.distance[:, at].values.tolist(),
            }
            for at, name in enumerate(found["variable"].values)
        },
        "step": found.step.values.tolist(),
    }  # fmt: skip
    if as_json:
        print_json(facts)
    else:
        print_comparison(facts)


@main.command()
@_RUN
@click.option(
    "--replay",
    "with_replay",
    is_flag=True,
    help="Recompute every step with the recorded optimizer, and compare bit for bit. Needs torch.",
)
@_JSON
@_sentences
def verify(run: str, with_replay: bool, as_json: bool) -> None:
    """Read everything that is stored of a run against its checksums. Nothing is changed.

    Exits with 1 if anything is wrong.

    \b
    Example:
      trajstore verify gatsby.zarr
      trajstore verify gatsby.zarr --replay
    """
    from trajstore.verification import verify as check

    with BytesProgress("verifying") as progress:
        found = check(run, on_progress=progress.show)
    # What is broken is not worth replaying.
    replayed = _replay(run) if with_replay and found.clean else None
    if as_json:
        facts = None if replayed is None else replayed.facts()
        print_json(found.facts() | ({"replay": facts} if with_replay else {}))
    else:
        print_verification(found)
        if replayed is not None:
            print_replay(replayed)
        elif with_replay:
            out.print("The replay was left out, because the run is damaged; repair it first.")
    if not found.clean or (replayed is not None and not replayed.clean):
        sys.exit(1)


def _replay(run: str) -> Any:
    try:
        from trainers.replay import replay
    except ImportError as error:
        if (error.name or "").partition(".")[0] in ("trajstore", "trainers", "analysis"):
            raise
        raise MissingExtra(
            f"replaying carries out every step with torch, and {error.name or error} is missing; "
            "install trajstore[train]"
        ) from error
    with StepsProgress("replaying") as progress:
        return replay(run, on_progress=progress.show)


@main.command()
@_RUN
@click.option("--yes", is_flag=True, help="Do it; without this, only say what would be done.")
@_JSON
@_sentences
def repair(run: str, yes: bool, as_json: bool) -> None:
    """Bring a damaged run back to its last whole commit.

    Says what would be done, and does it with --yes. Exits with 1 if something cannot be repaired.

    \b
    Example:
      trajstore repair gatsby.zarr
      trajstore repair gatsby.zarr --yes
    """
    from trajstore.repair import repair as mend

    with BytesProgress("checking") as progress:
        found = mend(run, yes=yes, on_progress=progress.show)
    if as_json:
        print_json(found.facts())
    else:
        print_repair(found)
    if found.unrepaired:
        sys.exit(1)

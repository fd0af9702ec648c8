"""The commands `evaluate`, `checkout`, `what-if` and `annotate`, which read recorded runs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trajstore.cli.command_options import RUN, SELECT
from trajstore.cli.output import StepsProgress, out, print_notes
from trajstore.cli.stop_signals import StopRequest
from trajstore.errors import CorpusError, InvalidArgument, did_you_mean, needs_extra
from trajstore.installation import version_of
from trajstore.trainers.commands.configuration import CORPUS, RUN_TOKENIZER, TOKENIZER

if TYPE_CHECKING:
    import numpy.typing as npt

    from trajstore.trainers.evaluations.evaluate import Evaluation


_OPTIONS = {
    "loss": ("text", "length"),
    "hidden-cosine": ("text", "length"),
    "attention": ("prompt",),
    "cka": ("prompt",),
    "logit-lens": ("prompt",),
    "generation": ("prompt", "length"),
}
"""Ready-made evaluations and their options; the first one is required."""


CONSTRUCTOR = click.option(
    "--constructor",
    metavar="FILE.py:FUNCTION",
    help="Function that returns the model, for runs that do not record its configuration.",
)


@click.command()
@RUN
@click.argument("function", metavar="FUNCTION")
@click.option("-o", "--output", required=True, type=click.Path(), help="Zarr store of the results.")
@click.option(
    "--every",
    type=click.IntRange(1),
    default=1,
    help="Evaluate the steps that are multiples of K; default: 1.",
    metavar="K",
)
@SELECT("step")
@click.option("--text", type=click.Path(), metavar="FILE", help="Text of loss or hidden-cosine.")
@click.option(
    "--prompt", metavar="TEXT", help="Prompt of attention, cka, logit-lens or generation."
)
@click.option(
    "--length",
    type=click.IntRange(1),
    metavar="N",
    help="Tokens to read of --text (default: all) or to generate (default: 40).",
)
@RUN_TOKENIZER
@CONSTRUCTOR
@click.option("--overwrite", is_flag=True, help="Replace existing results.")
def evaluate(
    run: str, function: str, output: str, selected: dict[str, Any], **options: Any
) -> None:
    """Call a function with the model of each step, and append its results to a Zarr store.

    FUNCTION is FILE.py:NAME, MODULE:NAME, or a ready-made evaluation: loss and hidden-cosine
    (--text), attention, cka, logit-lens and generation (--prompt). A function is called with the
    model and the step, and returns a dict of numbers, arrays and texts.

    The run must be recorded with --variables everything or keyframes. Steps between keyframes need
    --select. After a kill or an error, the same command evaluates the missing steps only. The
    results have the steps of the run: xr.merge joins both.

    \b
    Example:
      trajstore evaluate gatsby.zarr loss --text unseen.txt --every 10 -o loss.zarr
      trajstore evaluate gatsby.zarr cka --prompt "In my younger" --every 10 -o cka.zarr
      trajstore evaluate gatsby.zarr generation --prompt "In my younger" --every 50 -o texts.zarr
      trajstore evaluate gatsby.zarr probe.py:norms --select step=0:500 -o norms.zarr
    """
    inputs = {name: options.pop(name) for name in ("text", "prompt", "length", "tokenizer")}
    check_options(function, inputs)
    from trajstore import trainers

    with StopRequest() as stop, StepsProgress("evaluating", stop=stop) as progress:
        evaluated = trainers.evaluate(
            run,
            function if ":" in function else _ready_made(run, function, inputs),
            output,
            on_progress=progress.show,
            **selected,
            **options,
        )
    out.print(
        f"Wrote {output}: {', '.join(evaluated.names)} of {evaluated.steps} steps, {evaluated.new} "
        "of them new."
    )
    out.print(f"Open it with: xr.open_zarr({output!r})")


def check_options(function: str, options: dict[str, Any]) -> None:
    """Check that the options belong to the function, before torch is imported.

    Raises
    ------
    InvalidArgument
        If the function is unknown, an option does not belong to it, or a required one is missing.
    """
    if ":" not in function and function not in _OPTIONS:
        raise InvalidArgument(
            f"got {function!r}{did_you_mean(function, _OPTIONS)}, expected FILE.py:FUNCTION or one "
            f"of {', '.join(_OPTIONS)}"
        )
    known = _OPTIONS.get(function, ())
    for name, value in options.items():
        if value is not None and name != "tokenizer" and name not in known:
            raise InvalidArgument(f"{function} has no option --{name}; leave it out")
    if function not in _OPTIONS and options["tokenizer"] is not None:
        raise InvalidArgument(f"{function} has no option --tokenizer; leave it out")
    if known and options[known[0]] is None:
        kind = "FILE" if known[0] == "text" else "TEXT"
        raise InvalidArgument(f"{function} needs --{known[0]}; add --{known[0]} {kind}")


def _ready_made(run: str, name: str, options: dict[str, Any]) -> Evaluation:
    from trajstore.trainers.evaluations import READY_MADE

    first, *others = _OPTIONS[name]
    chosen = {key: options[key] for key in (*others, "tokenizer")}
    evaluation: Evaluation = READY_MADE[name](run, options[first], **chosen)
    return evaluation


@click.command()
@RUN
@click.option(
    "--at",
    "step",
    type=int,
    required=True,
    metavar="STEP",
    help="Step after which the model is written.",
)
@click.option("-o", "--output", required=True, type=click.Path(), help="New folder or file.")
@click.option(
    "--optimizer", is_flag=True, help="Also write optimizer.pt, the optimizer's state dict."
)
@RUN_TOKENIZER
@CONSTRUCTOR
@click.option("--overwrite", is_flag=True, help="Replace an existing folder or file.")
@needs_extra("checkout", "torch")
def checkout(run: str, output: str, constructor: str | None, **options: Any) -> None:
    """Write the model of a recorded step to a folder that transformers loads, or to a file.

    The run must be recorded with --variables everything or keyframes. The weights have the recorded
    bits.
    AutoModelForCausalLM.from_pretrained reads the folder. AutoTokenizer.from_pretrained reads the
    tokenizer, if the run has one. Of a model that is not of transformers, which needs
    --constructor, the folder has model.pt, its state dict. A path that ends in .pt, .pth or
    .safetensors is a file with the state dict; without --constructor, it has the parameters and the
    recorded buffers.

    \b
    Example:
      trajstore checkout gatsby.zarr --at 300 -o step-300/
      trajstore checkout gatsby.zarr --at 300 --optimizer -o step-300-optimizer/
      trajstore checkout lstm.zarr --at 300 --constructor model.py:build -o lstm-300/
      trajstore checkout lstm.zarr --at 300 -o lstm-300.safetensors
    """
    from trajstore import trainers
    from trajstore.trainers.evaluations.evaluate import load_function

    if version_of("transformers"):
        from transformers.utils import logging

        logging.disable_progress_bar()
    build = None if constructor is None else load_function(constructor)
    with StopRequest():
        folder = trainers.checkout(run, output, constructor=build, **options)
    of_transformers = (folder.path / "config.json").exists()
    weights = folder.path if folder.path.is_file() else folder.path / "model.pt"
    parts = [
        "model" if of_transformers or weights == folder.path else "model.pt",
        *(["tokenizer"] if folder.tokenizer else []),
    ]
    parts += ["optimizer.pt"] if options["optimizer"] else []
    out.print(f"Wrote {output}: {', '.join(parts)} of step {options['step']} of {run}.")
    print_notes(folder.notes)
    if of_transformers:
        out.print(f"Load it with: AutoModelForCausalLM.from_pretrained({output!r})")
    else:
        is_safe = weights.suffix.lower() == ".safetensors"
        load = "safetensors.torch.load_file" if is_safe else "torch.load"
        strict = "" if folder.strict else ", strict=False"
        out.print(f"Load it with: model.load_state_dict({load}({str(weights)!r}){strict})")


@click.command()
@RUN
@SELECT("step")
@click.option("-o", "--output", required=True, type=click.Path(), help="Path of the new run.")
@CORPUS
@TOKENIZER
@click.option(
    "--allow-different", is_flag=True, help="Store the steps also if they differ, with a mark."
)
@click.option("--overwrite", is_flag=True, help="Replace an existing run.")
@needs_extra("develop", "train")
def develop(run: str, output: str, selected: dict[str, Any], **options: Any) -> None:
    """Train the steps between keyframes again, as a run with everything.

    The run must be recorded with --variables keyframes. The steps are trained from the keyframe
    before them. Every value is compared with the recorded ones, and all parameters and gradients
    with their digests. A difference is an error, which names the step and the parameter. Steps of
    an own loop need the loop: trajstore.trainers.develop.

    \b
    Example:
      trajstore develop gatsby.zarr --select step=4300:4400 -o part.zarr
      trajstore summary part.zarr
    """
    from trajstore import trainers

    steps = selected.get("steps")
    if steps is None:
        raise InvalidArgument("develop needs the steps; give --select step=FIRST:STOP")
    with StopRequest(), StepsProgress("developing") as progress:
        developed = trainers.develop_run(
            run, output, steps=steps, on_retrain=progress.show, **options
        )
    out.print(
        f"Wrote {output}: {developed.steps} steps, developed from the keyframe of step "
        f"{developed.keyframe}."
    )
    if developed.difference is not None:
        print_notes([f"the steps differ from the recorded ones: {developed.difference}"])


@click.command("what-if")
@RUN
@click.option("-o", "--output", required=True, type=click.Path(), help="Path of the new run.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="SECTION.FIELD=VALUE",
    help="Change one setting, such as optimizer.state_dtype=float32. Repeatable.",
)
@click.option("--at", type=int, metavar="STEP", help="Step to start from; default: the first.")
@click.option("--tokens", default="all", metavar="all|dead|live|FILE", help="Tokens to compute.")
@click.option("--overwrite", is_flag=True, help="Replace an existing run.")
def what_if(run: str, output: str, tokens: str, **options: Any) -> None:
    """Apply a run's recorded gradients with other optimizer settings, as a new run.

    The gradients stay those of the recorded run; the new settings do not affect them (open loop).
    Settings that may change: optimizer.name, lr, betas, eps, momentum, weight_decay, state_dtype
    and rounding; schedule.name, warmup_steps and steps; training.max_grad_norm; model.dtype.
    Without a change, the result equals the run bit for bit.

    \b
    Example:
      trajstore what-if gatsby.zarr --set optimizer.state_dtype=float32 -o wide.zarr
      trajstore what-if gatsby.zarr --set schedule.name=constant --at 500 -o constant.zarr
      trajstore what-if gatsby.zarr --set rounding=stochastic --tokens dead -o dither.zarr
      trajstore compare gatsby.zarr wide.zarr
    """
    from trajstore.store.writing.create import check_local_target

    check_local_target(output, overwrite=options["overwrite"])  # before torch is imported
    from trajstore import trainers

    compute = trainers.what_if  # without torch, this names the extra
    from trajstore.trainers.recording.options import read_tokens

    with StopRequest() as stop, StepsProgress("computing", stop=stop) as progress:
        written = compute(
            run,
            output,
            tokens=tokens if tokens in ("all", "dead", "live") else read_tokens(tokens),
            on_progress=progress.show,
            **options,
        )
    out.print(
        f"Wrote {output}: {written.rows} rows, steps {written.first_step} to {written.last_step}, "
        f"from the gradients of {run}."
    )
    print_notes(written.notes)
    if tokens == "all":  # runs of other tokens cannot be compared value by value
        out.print(f"Compare the runs with: trajstore compare {shlex.join([run, output])}")


@click.command()
@RUN
@click.option("--corpus", type=click.Path(), metavar="TEXT", help="Text that was trained on.")
@click.option("--tokenizer", type=click.Path(), metavar="ascii|PATH", help="Tokenizer of the text.")
@click.option(
    "--masks", type=click.Path(), metavar="FILE", help="Masks, ids or counts of tokens, any format."
)
@click.option(
    "--texts",
    type=click.Path(),
    metavar="FILE",
    help="JSON list with the text of each token id.",
)
@click.option("--overwrite", is_flag=True, help="Replace existing coordinates.")
@needs_extra("annotate", "train")
def annotate(
    run: str,
    corpus: str | None,
    tokenizer: str | None,
    masks: str | None,
    texts: str | None,
    overwrite: bool,
) -> None:
    """Label dead tokens, occurrences and texts of tokens after recording.

    The rows stay unchanged, as hard links; the run is replaced as a whole. The content digest and
    the fingerprint change with the coordinates.

    \b
    Example:
      trajstore annotate run.zarr --corpus book.txt --tokenizer gpt2/
      trajstore annotate run.zarr --tokenizer ascii
      trajstore annotate run.zarr --masks dead_mask.npy --texts texts.json
    """
    import numpy as np

    from trajstore.exchange.token_tables import annotations_of, texts_of
    from trajstore.store.reading.open_group import open_group
    from trajstore.store.writing.create import annotate_run, check_unlabeled

    if corpus is not None and tokenizer is None:
        raise InvalidArgument(
            "--corpus needs the tokenizer of the text: --tokenizer ascii, or --tokenizer FOLDER"
        )
    if masks is not None and corpus is not None:
        raise InvalidArgument("got both --masks and --corpus, which both set is_dead; give one")
    if texts is not None and tokenizer is not None:
        raise InvalidArgument("got both --texts and --tokenizer, which set token_text; give one")
    if not overwrite:  # before a file is read, or transformers is imported
        sources = {
            "token_text": texts or tokenizer,
            "is_dead": masks or corpus,
            "token_count": corpus,
        }
        check_unlabeled(run, [name for name, file in sources.items() if file is not None])
    token = np.asarray(open_group(run)["token"])
    coordinates: dict[str, Any] = {} if masks is None else annotations_of(masks, token)
    if texts is not None:
        coordinates["token_text"] = texts_of(texts, token)
    if tokenizer is not None:
        coordinates |= _text_coordinates(corpus, tokenizer, token)
    added = annotate_run(run, **coordinates, overwrite=overwrite)
    dead = ""
    if "is_dead" in coordinates:
        dead = f"; {np.count_nonzero(coordinates['is_dead'])} of {len(token)} tokens are dead"
    out.print(f"{run} now has {', '.join(added)}{dead}.")


def _text_coordinates(
    corpus: str | None, tokenizer: str, token: npt.NDArray[Any]
) -> dict[str, Any]:
    """Return the coordinates that a tokenizer and a text give."""
    import numpy as np

    from trajstore.trainers.texts import AsciiTokenizer, FileTokenizer, tokenize_file

    encoder = AsciiTokenizer() if tokenizer == "ascii" else FileTokenizer(tokenizer)
    if len(token) and int(token.max()) >= encoder.vocab_size:
        raise CorpusError(
            f"the run has token {token.max()}, but the tokenizer {encoder.name} has only "
            f"{encoder.vocab_size} tokens; give the tokenizer of the run"
        )
    texts = np.array(encoder.texts(), dtype=object)
    coordinates: dict[str, Any] = {"token_text": [str(text) for text in texts[token]]}
    if corpus is not None:
        counts = tokenize_file(Path(corpus), encoder).counts()[token]
        coordinates |= {"token_count": counts, "is_dead": counts == 0}
    return coordinates

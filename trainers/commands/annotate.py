"""The command `annotate`, which labels the tokens of a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trajstore.cli.options import RUN
from trajstore.cli.output import out
from trajstore.errors import CorpusError, InvalidArgument, needs_extra

if TYPE_CHECKING:
    import numpy.typing as npt


@click.command()
@RUN
@click.option("--corpus", type=click.Path(), metavar="TEXT", help="Text that was trained on.")
@click.option("--tokenizer", type=click.Path(), metavar="ascii|PATH", help="Tokenizer of the text.")
@click.option(
    "--masks", type=click.Path(), metavar="FILE", help="Masks, ids or counts of tokens, any format."
)
@click.option("--overwrite", is_flag=True, help="Replace existing coordinates.")
@needs_extra("annotate", "train")
def annotate(
    run: str,
    corpus: str | None,
    tokenizer: str | None,
    masks: str | None,
    overwrite: bool,
) -> None:
    """Label dead tokens, occurrences and texts of tokens after recording.

    The rows stay unchanged, as hard links; the run is replaced as a whole. The content digest and
    the fingerprint change with the coordinates.

    \b
    Example:
      trajstore annotate run.zarr --corpus book.txt --tokenizer gpt2/
      trajstore annotate run.zarr --tokenizer ascii
      trajstore annotate run.zarr --masks dead_mask.npy
    """
    import numpy as np

    from trajstore.exchange.token_tables import annotations_of
    from trajstore.store.reading.open_run import open_group
    from trajstore.store.writing.create import annotate_run, check_unlabeled

    if corpus is not None and tokenizer is None:
        raise InvalidArgument(
            "--corpus needs the tokenizer of the text: --tokenizer ascii, or --tokenizer FOLDER"
        )
    if masks is not None and corpus is not None:
        raise InvalidArgument("got both --masks and --corpus, which both set is_dead; give one")
    if not overwrite:  # before a file is read, or transformers is imported
        given = {"token_text": tokenizer, "is_dead": masks or corpus, "token_count": corpus}
        check_unlabeled(run, [name for name, source in given.items() if source is not None])
    token = np.asarray(open_group(run)["token"])
    found: dict[str, Any] = {} if masks is None else annotations_of(masks, token)
    if tokenizer is not None:
        found |= _text_coordinates(corpus, tokenizer, token)
    added = annotate_run(run, **found, overwrite=overwrite)
    dead = ""
    if "is_dead" in found:
        dead = f"; {np.count_nonzero(found['is_dead'])} of {len(token)} tokens are dead"
    out.print(f"{run} now has {', '.join(added)}{dead}.")


def _text_coordinates(
    corpus: str | None, tokenizer: str, token: npt.NDArray[Any]
) -> dict[str, Any]:
    """Return the coordinates that a tokenizer and a text give."""
    import numpy as np

    from trajstore.trainers.texts.corpus import tokenize_file
    from trajstore.trainers.texts.tokenizer import AsciiTokenizer, FileTokenizer

    maker = AsciiTokenizer() if tokenizer == "ascii" else FileTokenizer(tokenizer)
    if len(token) and int(token.max()) >= maker.vocab_size:
        raise CorpusError(
            f"the run has token {token.max()}, but the tokenizer {maker.name} has only "
            f"{maker.vocab_size} tokens; give the tokenizer of the run"
        )
    texts = np.array(maker.texts(), dtype=object)
    found: dict[str, Any] = {"token_text": [str(text) for text in texts[token]]}
    if corpus is not None:
        counts = tokenize_file(Path(corpus), maker).counts()[token]
        found |= {"token_count": counts, "is_dead": counts == 0}
    return found

"""The command that tells a run about its tokens afterwards: annotate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trajstore.cli.errors import sentences
from trajstore.cli.options import JSON, RUN
from trajstore.cli.tables import out, print_json
from trajstore.errors import CorpusError, InvalidArgument

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["annotate"]


@click.command()
@RUN
@click.option("--corpus", type=click.Path(), metavar="TEXT", help="The text that was trained on.")
@click.option(
    "--tokenizer", type=click.Path(), metavar="ascii|PATH", help="What made token ids of it."
)
@click.option(
    "--masks", type=click.Path(), metavar="FILE", help="Masks, ids or counts of tokens, any format."
)
@click.option("--overwrite", is_flag=True, help="Replace coordinates that are there.")
@JSON
@sentences
def annotate(
    run: str,
    corpus: str | None,
    tokenizer: str | None,
    masks: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Tell a run which of its tokens are dead, how often each occurs, and how it reads.

    The rows stay as they are, as hard links, and the run is exchanged as a whole. Its content
    digest and fingerprint become those of a run that has these coordinates.

    \b
    Example:
      trajstore annotate run.zarr --corpus book.txt --tokenizer gpt2/
      trajstore annotate run.zarr --tokenizer ascii
      trajstore annotate run.zarr --masks dead_mask.npy
    """
    import numpy as np

    from trajstore.exchange.importing.token_masks import annotations_of
    from trajstore.store.reading.open_group import open_group
    from trajstore.store.writing.annotated_run import annotate_run, check_unlabeled

    if corpus is not None and tokenizer is None:
        raise InvalidArgument("name what makes tokens of the text: --tokenizer ascii, or a folder")
    if masks is not None and corpus is not None:
        raise InvalidArgument("both --masks and --corpus tell the dead tokens; name one of them")
    if not overwrite:  # before a file is read, or transformers is imported
        told = {"token_text": tokenizer, "is_dead": masks or corpus, "token_count": corpus}
        check_unlabeled(run, [name for name, source in told.items() if source is not None])
    token = np.asarray(open_group(run)["token"])
    found: dict[str, Any] = {} if masks is None else annotations_of(masks, token)
    if tokenizer is not None:
        found |= _of_text(corpus, tokenizer, token)
    added = annotate_run(run, **found, overwrite=overwrite)
    facts: dict[str, Any] = {"run": run, "added": list(added), "tokens": len(token)}
    if "is_dead" in found:
        facts["dead"] = int(np.count_nonzero(found["is_dead"]))
    if as_json:
        print_json(facts)
        return
    dead = f"; {facts['dead']} of {len(token)} tokens are dead" if "dead" in facts else ""
    out.print(f"{run} now has {', '.join(added)}{dead}.")


def _of_text(corpus: str | None, tokenizer: str, token: npt.NDArray[Any]) -> dict[str, Any]:
    """Coordinates that a tokenizer, and a text, tell."""
    import numpy as np

    from trajstore.trainers.texts.corpus import tokenize_file
    from trajstore.trainers.texts.tokenizer import AsciiTokenizer, FileTokenizer

    maker = AsciiTokenizer() if tokenizer == "ascii" else FileTokenizer(tokenizer)
    if len(token) and int(token.max()) >= maker.vocab_size:
        raise CorpusError(
            f"the run has token {token.max()}, and the tokenizer {maker.name} has "
            f"{maker.vocab_size} tokens; it is not the run's"
        )
    texts = np.array(maker.texts(), dtype=object)
    found: dict[str, Any] = {"token_text": [str(text) for text in texts[token]]}
    if corpus is not None:
        counts = tokenize_file(Path(corpus), maker).counts()[token]
        found |= {"token_count": counts, "is_dead": counts == 0}
    return found

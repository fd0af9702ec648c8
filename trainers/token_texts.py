"""How the tokens of a tokenizer read."""

from __future__ import annotations

from typing import Any

__all__ = ["printable", "token_texts"]


def token_texts(backend: Any) -> tuple[str, ...]:
    """How each token reads; a token that is no whole character reads as its symbol.

    Parameters
    ----------
    backend : tokenizers.Tokenizer
    """
    ids = range(backend.get_vocab_size(with_added_tokens=True))
    decoded = backend.decode_batch([[i] for i in ids], skip_special_tokens=False)
    return tuple(
        printable(text) if text and "\ufffd" not in text else backend.id_to_token(i) or ""
        for i, text in zip(ids, decoded, strict=True)
    )


def printable(text: str) -> str:
    """A text as it is, or with escapes where a terminal would act on it.

    >>> printable("the"), printable("a\\tb")
    ('the', 'a\\\\tb')
    """
    return text if text.isprintable() else repr(text)[1:-1]

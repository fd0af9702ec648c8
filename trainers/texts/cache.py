"""Where `trajstore fetch` puts texts and tokenizers, and where `record` looks for them."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

__all__ = ["CACHED", "CACHE_VARIABLE", "cache_folder", "cached"]

CACHE_VARIABLE = "TRAJSTORE_CACHE"
"""Environment variable that names another folder."""

CACHED = {
    "gatsby": "gatsby.txt",
    "fineweb": "fineweb.txt",
    "gpt2": "gpt2",
}


def cache_folder() -> Path:
    """The user's cache; it need not exist."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given) if given else platformdirs.user_cache_path("trajstore", appauthor=False)


def cached(name: str) -> Path | None:
    """What was fetched under that name (``gatsby``, ``fineweb``, ``gpt2``), or None."""
    path = cache_folder() / CACHED[name]
    return path if path.exists() else None

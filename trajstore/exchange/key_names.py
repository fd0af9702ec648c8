"""Names in files, which exports write and imports read; those of notebooks have their own table."""

from __future__ import annotations

__all__ = ["DEAD_IDS", "HDF5_KEYS", "HDF5_TEXTS", "KEPT_ATTRIBUTES", "MASKS", "STEPS_KEY"]

STEPS_KEY = "recorded_steps"
"""The steps of the rows."""

HDF5_KEYS = {
    "W": "W",
    "grad": "grad_W",
    "exp_avg": "momentum_W",
    "exp_avg_sq": "variance_W",
    "logits": "logits",
    "loss": "losses",
}
"""Names of variables in HDF5 files; the others keep theirs."""

HDF5_TEXTS = {
    "attributes": "trajstore_json",
    "variables": "variables_json",
    "token_text": "token_text_json",
}
"""Names of texts in HDF5 files: attributes of the run and of its variables, and its tokens."""

MASKS = {"untrained_mask": True, "trained_mask": False}
"""Masks along ``token``, and whether they mark the dead tokens."""

DEAD_IDS = {
    "dead_token_ids": True,
    "live_token_ids": False,
    "untrained_indices": True,
    "trained_indices": False,
}
"""Lists of token ids, and whether they are those of the dead tokens."""

KEPT_ATTRIBUTES = ("config", "optimizer", "provenance", "imported", "created")
"""Attributes of the root that say where the values come from, and stay true of a copy."""

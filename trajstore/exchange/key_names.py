"""Names in files of trajstore itself, which exports write and imports read."""

from __future__ import annotations

__all__ = ["HDF5_KEYS", "HDF5_TEXTS", "KEPT_ATTRIBUTES"]

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
    "parameter": "parameter_json",
}
"""Names of texts in HDF5 files: attributes of the run and its variables, tokens, parameters."""

KEPT_ATTRIBUTES = ("config", "optimizer", "recording", "provenance", "imported", "created")
"""Attributes of the root that say where the values come from, and stay true of a copy."""

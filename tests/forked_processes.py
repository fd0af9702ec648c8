"""Processes that begin with what is slow to import."""

from __future__ import annotations

import multiprocessing

processes = multiprocessing.get_context("forkserver")
# What is slow to import, where it is installed. No module of the tests: Python 3.11 does not tell
# the server where they are.
processes.set_forkserver_preload(
    [
        "xarray",
        "zarr",
        "trajstore.exchange.export",
        "trajstore.integrity.repair",
        "trajstore.trainers.evaluations.evaluate",
        "trajstore.trainers.runs.record",
        "transformers.models.gpt2.modeling_gpt2",
    ]
)

"""A new run of hard links to the blocks of another one, with other metadata.

Objects of a store are replaced and never modified, so two runs may share a file. Resuming, cutting
or repairing one of them does not change the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from trajstore.store.metadata.metadata_form import Status, run_identity
from trajstore.store.metadata.object_keys import METADATA_KEY
from trajstore.store.metadata.zarr_json import RunMetadata
from trajstore.store.storage.atomic import link_or_copy, put
from trajstore.store.writing.resumed_run import ResumedRun, block_fingerprints


def link_run(
    stored: ResumedRun,
    new: Path,
    keys: Iterable[str],
    metadata: RunMetadata,
    *,
    status: Status,
    chunks: Mapping[str, bytes] | None = None,
) -> None:
    """Create a run that shares the objects of another one.

    Nothing is flushed here; `staged_run` flushes the run before it renames it.

    Parameters
    ----------
    stored : ResumedRun
        The local source, with the rows of the new run.
    new : Path
        A folder that does not exist yet.
    keys : iterable of str
        Objects of the source to link, or to copy if the file system does not support links.
        Metadata files of the new run, and `chunks`, replace some of them.
    metadata : RunMetadata
        Metadata of the new run.
    status : str
    chunks : mapping of str to bytes, optional
        Other objects of the new run, by key.
    """
    written = {
        f"{name}/{METADATA_KEY}": metadata.array(name, stored.rows) for name in metadata.names()
    }
    written |= chunks or {}
    assert isinstance(stored.path, Path)  # only local runs can be sources
    for key in keys:
        if key not in written and key != METADATA_KEY:
            (new / key).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(stored.path / key, new / key)
    for key, data in written.items():
        (new / key).parent.mkdir(parents=True, exist_ok=True)
        put(new / key, [data], fsync=False)
    runs = run_identity(metadata.attributes)
    arrays = {
        name: replace(array, path=new, form=replace(array.form, runs=runs))
        for name, array in stored.arrays.items()
        if name in metadata.series()
    }
    full = block_fingerprints(new, metadata, arrays, stored.layout.block_rows, stored.rows)[-1]
    held = full.ended([shard for shard in stored.unfinished if shard[0] in arrays])
    put(new / METADATA_KEY, [metadata.root(stored.rows, status, held.attributes())], fsync=False)

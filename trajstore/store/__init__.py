"""A run on disk: planning, writing, committing, locking and reading it.

Where one step's array goes: ``writer`` copies it to its place in a block, as ``block_plan`` has
laid it out, in the memory of ``block_buffers``. ``block_commits`` sees to what becomes of the
blocks: of a full one ``block_writer`` has the chunks encoded, joins them to a ``shard`` an array,
and puts that in place (``atomic``) under its name (``object_keys``). Then ``commit`` replaces the
documents (``zarr_json``), the root last, with the ``fingerprint`` of all that is there; from then
on readers see the row. ``commit_timer`` has that done with a block that is not full, too.
``open_run`` opens the run (``open_group``) as an ``xarray_engine``, if its arrays pass
``schema_check``, with ``block_view`` where they are not stored by the codec of blocks.
``array_reader`` reads native bits past zarr, for writers that go on, for verify, and in tiles
(``tiled_reader``) for exporters, and norms for an analysis that asks dask for nothing else
(``lazy_source``); ``run_info`` says what there is; ``open_runs`` opens many in one
Dataset.

Before the first row, ``new_run`` makes what a run begins with, and ``create`` its folder;
``resumed_run`` says what of a run that is there is kept, and ``branched_run`` makes another of its
first rows, of which ``fork_provenance`` tells who made them; ``annotated_run`` tells it of its
tokens afterwards. ``inner_links`` are refused by all of them. ``lock`` lets in one writer at a
time.

Where a matrix is sharded over processes, each is a writer of its ``token_share``, for which
``shared_plan`` lays out the run, and ``shared_commits`` has the first of them commit what all have
written.

All of that is the same for a folder and for what lies in an object store: ``remote_path`` is to an
address what a path is to a folder, by ``object_requests`` (``hub_address`` tells where a hub has
its files), ``object_file`` reads either in parts, and ``remote_lock`` is the lock where there are
no file locks.
"""

"""Places that hold a run: folders, object stores, locks.

``atomic``
    Objects of a run: each is replaced whole, or not at all, and never through a link.
``hub_address``
    Addresses on the hub of Hugging Face, as huggingface_hub writes them: ``hf://datasets/…``.
``lock``
    One writer at a time in a folder.
``object_file``
    An object of a run, open to be read in parts: a file, or what an object store holds.
``object_requests``
    Requests to obstore: errors in one line, one retry, and a store for zarr.
``remote_lock``
    One writer at a time in an object store.
``remote_path``
    Addresses of object stores, with as much of `pathlib.Path` as runs need.
"""

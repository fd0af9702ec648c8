"""Storage of a run: folders, object stores, locks.

``atomic``
    Atomic replacement of the objects of a run.
``hub_address``
    Addresses of the Hugging Face hub, as huggingface_hub writes them: ``hf://datasets/…``.
``lock``
    One writer at a time in a folder.
``object_file``
    An open object of a run, read in parts, from a file or an object store.
``object_requests``
    Requests to obstore: one-line errors, one retry, and a store for zarr.
``remote_lock``
    One writer at a time in an object store.
``remote_path``
    Addresses of object stores, with the part of the interface of `pathlib.Path` that runs need.
"""

"""A run on disk or in an object store: its metadata, its places, how it is read and written."""

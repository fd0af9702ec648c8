"""Places of a run: folders and object stores, atomic replacement of objects, locks."""

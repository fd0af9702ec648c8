"""One pass over the rows of a run, for all quantities."""

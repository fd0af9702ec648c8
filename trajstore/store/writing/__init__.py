"""Writing of a run: rows in blocks, each with an atomic commit; new, resumed and linked runs."""

"""Metadata of a run: the plan of its blocks, the documents of root and arrays, and digests."""

"""Recorded steps computed again by the real optimizer, each from the row before it."""

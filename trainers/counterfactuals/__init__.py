"""Recorded gradients, applied with other settings of the optimizer."""

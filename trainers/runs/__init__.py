"""Training runs from a configuration: planned, trained, resumed, forked and proven."""

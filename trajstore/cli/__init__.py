"""The program `trajstore`: code that all commands share, and commands that need only a run."""

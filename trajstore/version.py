"""The version, where the build and every module can read it."""

__version__ = "0.4.0.dev0"

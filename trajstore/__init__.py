"""Record every optimizer step of a training run into compressed Zarr arrays, and read it back."""

from trajstore.accessor import TrajAccessor
from trajstore.errors import (
    ConfigError,
    CorpusError,
    FormatError,
    InvalidArgument,
    MissingExtra,
    NothingToResume,
    RecordingError,
    RunExists,
    RunLocked,
    RunNotFound,
    StepNotFound,
    TrajstoreError,
    VariableNotRecorded,
    WriterClosed,
)
from trajstore.export import Exported, export
from trajstore.importing import Imported, import_file
from trajstore.reader import open_run
from trajstore.repair import Repair, repair
from trajstore.tensors import to_torch
from trajstore.verification import Verification, verify
from trajstore.version import __version__
from trajstore.writer import RunWriter

__all__ = [
    "ConfigError",
    "CorpusError",
    "Exported",
    "FormatError",
    "Imported",
    "InvalidArgument",
    "MissingExtra",
    "NothingToResume",
    "RecordingError",
    "Repair",
    "RunExists",
    "RunLocked",
    "RunNotFound",
    "RunWriter",
    "StepNotFound",
    "TrajAccessor",
    "TrajstoreError",
    "VariableNotRecorded",
    "Verification",
    "WriterClosed",
    "__version__",
    "export",
    "import_file",
    "open_run",
    "repair",
    "to_torch",
    "verify",
]

"""A checkpoint written by hand, as its format is described, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from safetensors.numpy import save_file

TENSORS = {
    "model.weight": np.arange(12, dtype="float32").reshape(3, 4),
    "optimizer.step": np.array(7, dtype="int64"),
    "random.state": np.arange(200, dtype="uint8"),
    "empty": np.zeros((0, 4), "float32"),
}


def write_checkpoint(path: Path, **changes: Any) -> None:
    """Write one; `changes` replace what its description says of a tensor."""
    path.parent.mkdir(exist_ok=True)
    described = {
        name: {
            "dtype": value.dtype.name,
            "shape": list(value.shape),
            "crc32c": google_crc32c.value(value.tobytes()),
        }
        for name, value in TENSORS.items()
    }
    text = json.dumps(
        {"format": 1, "step": 7, "config": {"é": 1e-5}, "tensors": described | changes}
    )
    metadata = {"trajstore": text, "crc32c": str(google_crc32c.value(text.encode()))}
    save_file(TENSORS, path, metadata)

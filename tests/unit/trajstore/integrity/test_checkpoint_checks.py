from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from checkpoints import write_checkpoint
from damage import cut, flip

from trajstore.formats.safetensors import SafetensorsFile
from trajstore.integrity import verify as checkpoint_files
from trajstore.integrity.verify import check_checkpoints
from trajstore.store.metadata.metadata_form import checkpoint_folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "run.ckpt" / "step-00000007.safetensors"
    write_checkpoint(path)
    return path


def messages(path: Path) -> list[str]:
    found = list(check_checkpoints(path.parent.with_name("run.zarr")))
    assert {(problem.array, problem.path) for problem in found} <= {(None, path)}
    return [problem.message for problem in found]


def test_checkpoints_are_in_a_folder_beside_the_run() -> None:
    assert checkpoint_folder(Path("/a/b.c.zarr")) == Path("/a/b.c.ckpt")
    assert checkpoint_folder(Path("/a/b.c")) == Path("/a/b.c.ckpt")


def test_a_broken_tensor_is_named_with_its_bytes(checkpoint: Path) -> None:
    name = "random.state"
    with SafetensorsFile(checkpoint) as file:
        entry = file.entries[name]
    flip(checkpoint, 8 * entry.begin + 5)
    (problem,) = check_checkpoints(checkpoint.parent.with_name("run.zarr"))
    assert f"the tensor {name} does not fit its checksum" in problem.message
    assert (problem.first_byte, problem.stop_byte) == (entry.begin, entry.end)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.weight": {"dtype": "int32", "shape": [3, 4], "crc32c": 0}}, "type and shape"),
        ({"model.weight": {"dtype": "float32", "shape": [4, 3], "crc32c": 0}}, "type and shape"),
        ({"more": {"dtype": "float32", "shape": [1], "crc32c": 0}}, "more is missing"),
    ],
)
def test_tensors_must_be_as_described(
    checkpoint: Path, changes: dict[str, object], message: str
) -> None:
    write_checkpoint(checkpoint, **changes)
    assert len(messages(checkpoint)) == 1
    assert message in messages(checkpoint)[0]


def test_a_truncated_checkpoint_is_found(checkpoint: Path) -> None:
    for size in (-1, 5):
        cut(checkpoint, size)
        assert len(messages(checkpoint)) == 1


def test_every_flipped_bit_is_found(checkpoint: Path) -> None:
    """Anywhere: in the length, the header, its padding, the description and the tensors."""
    size = 8 * checkpoint.stat().st_size
    for bit in random.Random(5).sample(range(size), 400):
        flip(checkpoint, bit)
        assert messages(checkpoint), f"bit {bit}"
        flip(checkpoint, bit)


def test_a_file_without_a_description_is_no_checkpoint(checkpoint: Path) -> None:
    header = json.dumps({"__metadata__": {}}).encode()
    checkpoint.write_bytes(len(header).to_bytes(8, "little") + header)
    assert "description" in messages(checkpoint)[0]


def test_files_of_somebody_else_are_no_checkpoints(checkpoint: Path) -> None:
    for name in ("model.safetensors", "step-7.safetensors", "my-step-00000007"):
        (checkpoint.parent / name).write_bytes(b"mine")
    assert messages(checkpoint) == []


def test_a_checkpoint_that_vanishes_during_the_check_is_ignored(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is opened, and afterwards, as a recording removes the older ones."""

    class Goes(SafetensorsFile):
        def __init__(self, path: Path) -> None:
            if path.name == "step-00000008.safetensors":
                path.unlink()
            super().__init__(path)
            path.unlink()

    write_checkpoint(checkpoint.with_name("step-00000008.safetensors"))
    monkeypatch.setattr(checkpoint_files, "SafetensorsFile", Goes)
    assert messages(checkpoint) == []
    assert list(checkpoint.parent.iterdir()) == []


def test_what_cannot_be_read_is_reported_and_stays(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint.with_name("step-00000009.safetensors")
    folder.mkdir()
    (problem,) = check_checkpoints(checkpoint.parent.with_name("run.zarr"))
    assert (problem.path, problem.remedy) == (folder, "none")
    assert "no file" in problem.message
    folder.rmdir()

    class Refused(SafetensorsFile):
        def __init__(self, path: Path) -> None:
            raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(checkpoint_files, "SafetensorsFile", Refused)
    (problem,) = check_checkpoints(checkpoint.parent.with_name("run.zarr"))
    assert (problem.path, problem.remedy) == (checkpoint, "none")
    assert "Input/output error" in problem.message

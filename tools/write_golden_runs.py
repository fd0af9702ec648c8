"""Write small runs of the installed version, which every later version reads.

``python tools/write_golden_runs.py`` writes the archive tests/data/runs-VERSION.zip. It also holds
digests.json: for each run SHA-256 of every variable and coordinate. The archive of 0.3.0 has two
more runs, of a build before it: `delta` with a block of three rows, `parts` with several objects a
block. ``python tools/write_golden_runs.py keyframes`` writes that run alone, of a build before a
release, as runs-VERSION-keyframes.zip.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from golden_runs import DATA, LOOPS, digests  # noqa: E402

TRAJSTORE = Path(sys.executable).with_name("trajstore")
SMALL = ("record --preset gatsby --steps 6 --threads 1 --set model.hidden=4 --set model.layers=1 "
         "--set model.heads=1 --set model.context=16 --set training.batch_size=4")  # fmt: skip
EXACT = "--set model.dtype=float32 --set training.autocast=none"
COMMANDS = {
    "matrix": SMALL,
    "compact": f"{SMALL} --encoding compact --steps 10 --set recording.block_rows=4",
    "weights": f"{SMALL} {EXACT} --variables weights",
    "grads": f"{SMALL} --variables weights+grads --set training.loop=plain "
    "--set model.dtype=float32 --set training.autocast=float16",
    "sgd": f"{SMALL} {EXACT} --set optimizer.name=sgd --set optimizer.momentum=0.9",
    "norms": f"{SMALL} --variables norms,cells --set training.accumulation=2",
    "everything": f"{SMALL} --variables everything --set recording.block_rows=4",
    "everything-compact": f"{SMALL} --variables everything --encoding compact",
    "keyframes": f"{SMALL} --variables keyframes --steps 10 --set recording.block_rows=4 "
    "--set recording.keyframe_every=4",
    "mixed": f"{SMALL} --set optimizer.state_dtype=float32 --population rare=token_count<9 "
    "--variables matrix,hidden_mean,hidden_trace,hidden_cosine,W_step_norm,W_ulp_l1",
    "untied": f"{SMALL} --set model.tied=false",
    "fork": "fork matrix.zarr --at 3 --steps 6 --set optimizer.lr=0.01",
    "imported": "import matrix.safetensors",
}


def write_runs(folder: Path, *names: str) -> None:
    """Write all runs, or some of those that a command writes."""
    for name in names:
        _run(folder, f"{COMMANDS[name]} -o {name}.zarr")
    if names:
        return
    for name, command in COMMANDS.items():
        if name == "imported":
            _run(folder, "export matrix.zarr -o matrix.safetensors")
        _run(folder, f"{command} -o {name}.zarr")
    (folder / "matrix.safetensors").unlink()

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
             "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    for process in [_start(folder, "sharded", **group, RANK=str(rank)) for rank in range(2)]:
        assert process.wait() == 0

    writer, metadata = _start(folder, "killed"), folder / "killed.zarr" / "zarr.json"
    while not metadata.exists() or '"committed_rows": 6' not in metadata.read_text():
        assert writer.poll() is None, "the writer has ended"
        time.sleep(0.1)  # between two looks at what is committed; the writer reports nothing
    writer.kill()
    writer.wait()


def _run(folder: Path, command: str) -> None:
    subprocess.run([TRAJSTORE, *command.split()], cwd=folder, check=True)


def _start(folder: Path, name: str, **environment: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    call = f"golden_runs.train(golden_runs.Path('{name}.zarr'), '{LOOPS[name]}', range(1, 8))"
    return subprocess.Popen(
        [sys.executable, "-c", f"import golden_runs; {call}"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path} | environment,
    )


def main(*names: str) -> None:
    """Write all runs, or those of these names."""
    import trajstore

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_runs(folder, *names)
        found = {}
        for path in sorted(folder.glob("*.zarr")):
            ds = trajstore.open_run(path)
            found[path.name] = {"fingerprint": ds.attrs["fingerprint"], "values": digests(ds)}
        (folder / "digests.json").write_text(json.dumps(found, indent=1))
        target = DATA / f"runs-{'-'.join([trajstore.__version__, *names])}.zip"
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for file in sorted(path for path in folder.rglob("*") if path.is_file()):
                archive.write(file, file.relative_to(folder))
    print(f"Wrote {target}: {len(found)} runs, {target.stat().st_size} bytes.")


if __name__ == "__main__":
    main(*sys.argv[1:])

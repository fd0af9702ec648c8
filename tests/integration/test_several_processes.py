"""Several processes train one model: one run, and to the bit what the gathered values are.

The processes import torch for seconds, so these tests are nightly.
"""

from __future__ import annotations

import os
import socket
import sys
import textwrap
import traceback
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from forked_processes import processes

from trajstore import open_run
from trajstore.integrity.verify import verify

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.nightly]

SECONDS = 120


def run_together(count: int, program: str, folder: Path, *arguments: object) -> None:
    """Run a program in so many processes that can join one group, and insist that all end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    errors = [folder / f"error{rank}.txt" for rank in range(count)]
    group = []
    for rank, error in enumerate(errors):
        environment = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        words = [textwrap.dedent(program), *map(str, arguments)]
        group.append(processes.Process(target=run_one, args=(words, environment, error)))
        group[-1].start()
    for process in group:
        process.join(SECONDS)
        process.kill()
        process.join()
    told = "\n".join(error.read_text() for error in errors if error.exists())
    assert [process.exitcode for process in group] == [0] * count, told


def run_one(words: list[str], environment: dict[str, str], error: Path) -> None:
    os.environ.update(environment)
    program, *sys.argv[1:] = words
    try:
        exec(compile(program, "train.py", "exec"), {"__name__": "__main__"})
    except BaseException:
        error.write_text(traceback.format_exc())
        raise


PROGRAM = """
    import os, sys
    import numpy as np, torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
    from trainings import TinyModel
    from trajstore.trainers import capture
    from trajstore.errors import TrajstoreError

    folder, rank = sys.argv[1], int(os.environ["RANK"])

    def made(tied=True):
        torch.manual_seed(0)
        model = TinyModel()
        if not tied:
            model.head = torch.nn.Linear(8, 17, bias=False)
        return model

    def gathered(model, optimizer, run, steps, other, clip):
        rows = []
        W = model.embedding.weight
        for step in steps:
            source = torch.Generator().manual_seed(step + other)
            ids = torch.randint(0, 17, (2, 5), generator=source)
            optimizer.zero_grad()
            output = model(ids, ids)
            output["loss"].backward()
            row = {"loss": output["loss"].detach(), "logits": output["logits"][0, -1].detach()}
            row["grad"] = W.grad.full_tensor().clone()
            if clip:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip).full_tensor()
                row |= {"grad_norm": norm, "clip_coef": torch.clamp(clip / (norm + 1e-6), max=1.0)}
            optimizer.step()
            row["W"] = W.full_tensor().detach().clone()
            for name in ("exp_avg", "exp_avg_sq"):
                row[name] = optimizer.state[W][name].full_tensor().clone()
            rows.append({name: value.numpy() for name, value in row.items()})
        return rows

    def keep(name, rows):
        if rank == 0:
            columns = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
            np.savez(f"{folder}/{name}.npz", **columns)

    def groups():
        return len(torch.distributed.distributed_c10d._world.pg_map)

    def refusal(model, optimizer, **options):
        try:
            with capture(model, optimizer, f"{folder}/refused.zarr", **options):
                pass
        except TrajstoreError as error:
            return str(error)

    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))

    # FSDP2, the head tied to the embedding; each process has its own batch
    model = fully_shard(made(), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    path = f"{folder}/fsdp.zarr"
    variables = ["matrix", "W_ulp_l1", "grad_token_norm", "example_loss"]
    how = {"variables": variables, "block_rows": 4, "max_grad_norm": 0.1}
    def told(run):
        run.observe(example_loss=[float(rank), 0.5])
    before = groups()
    with capture(model, optimizer, path, on_step=told, **how) as run:
        assert groups() == before + 1
        told(run)
        rows = gathered(model, optimizer, run, range(6), 100 * rank, 0.1)
        assert run.writer.layout.arrays["W"].row == ((9, 8), (8, 8))[rank]
    how |= {"resume": True, "first_step": 6, "on_step": told}
    with capture(model, optimizer, path, **how) as run:
        told(run)
        rows += gathered(model, optimizer, run, range(6, 9), 100 * rank, 0.1)
    keep("fsdp", rows)

    # recorded from here on: its first row is what the training has come to
    how = {"block_rows": 4, "max_grad_norm": 0.1, "first_step": 9}
    with capture(model, optimizer, f"{folder}/late.zarr", **how) as run:
        late = gathered(model, optimizer, run, range(9, 11), 100 * rank, 0.1)
    keep("late", rows[-1:] + late)
    how |= {"resume": True, "first_step": 11}

    # weights that are other ones in the second process only, and what is not known
    with torch.no_grad():
        model.embedding.weight.to_local()[0] += rank
    try:
        with capture(model, optimizer, f"{folder}/late.zarr", **how):
            pass
    except TrajstoreError as error:
        print(type(error).__name__, error, file=open(f"{folder}/other{rank}", "w"))
    assert groups() == before
    assert "is recorded with all tokens" in refusal(model, optimizer, tokens=[1, 2])
    assert "norms of sharded parameters" in refusal(model, optimizer, variables="norms")
    across = fully_shard(
        made(), mesh=mesh, shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1)
    )
    optimizer = torch.optim.AdamW(across.parameters())
    assert "Shard(0) over one dimension" in refusal(across, optimizer)
    inner = parallelize_module(
        made(), mesh, {"mix": RowwiseParallel(input_layouts=Replicate())}
    )
    optimizer = torch.optim.AdamW(inner.parameters())
    assert "is not a DTensor" in refusal(inner, optimizer)

    # vocabulary-parallel, the head not tied; all processes have the same batch
    split = {"embedding": RowwiseParallel(input_layouts=Replicate())}
    model = parallelize_module(made(tied=False), mesh, split)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    how = {"parameter": "embedding.weight", "block_rows": 4}
    assert "have the same " in refusal(model, optimizer, variables=["W", "batch"], **how)
    with capture(model, optimizer, f"{folder}/vocabulary.zarr", **how) as run:
        keep("vocabulary", gathered(model, optimizer, run, range(5), 0, None))
    torch.distributed.destroy_process_group()
"""


def test_two_processes_with_half_the_tokens_each(tmp_path: Path) -> None:
    run_together(2, PROGRAM, tmp_path, tmp_path)
    for name, steps in (("fsdp", 9), ("vocabulary", 5)):
        path = tmp_path / f"{name}.zarr"
        assert verify(path).clean
        ds = open_run(path)
        assert ds.attrs["status"] == "complete"
        assert ds.step.values.tolist() == list(range(steps + 1))
        with np.load(tmp_path / f"{name}.npz") as gathered:
            assert gathered.keys() >= {"W", "grad", "exp_avg", "exp_avg_sq", "loss"}
            for variable in gathered.keys() & ds.keys():
                recorded = np.ascontiguousarray(ds[variable].values[1:])
                assert np.array_equal(recorded.view("u4"), gathered[variable].view("u4")), variable
    late = open_run(tmp_path / "late.zarr")
    assert late.step.values.tolist() == [9, 10, 11]
    with np.load(tmp_path / "late.npz") as gathered:
        for variable in ("W", "exp_avg", "exp_avg_sq"):
            assert np.array_equal(late[variable].values, gathered[variable]), variable
            assert gathered[variable][0].any()
    ds = open_run(tmp_path / "fsdp.zarr")
    moved = np.linalg.norm(ds.grad.values.astype("f8"), axis=-1)
    np.testing.assert_allclose(ds.grad_token_norm, moved, rtol=1e-6)
    assert (ds.W_ulp_l1.values[1:] > 0).any(axis=0).all()
    assert ds.example_loss.values[3].tolist() == [0, 0.5, 1, 0.5]
    first, second = ((tmp_path / f"other{rank}").read_text() for rank in range(2))
    assert first.startswith("RecordingError the recording failed in process 1: NothingToResume")
    assert second.startswith("NothingToResume the weights of the training differ from")
    assert not list(tmp_path.glob("refused*"))


ONE_PROCESS = """
    import sys
    import numpy as np, torch
    from torch.distributed.fsdp import fully_shard
    from trainings import TinyModel, batches
    from trajstore.trainers import capture

    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for kind in ("synchronized", "kept", "held back"):
        for clip in (0, 0.05):
            torch.manual_seed(0)
            model = fully_shard(TinyModel(), mesh=mesh)
            adam = torch.optim.AdamW(model.parameters(), lr=0.01)
            path, rows, data = f"{sys.argv[1]}/{kind} {clip}", [], batches(9)
            with capture(model, adam, f"{path}.zarr", strict=True) as run:
                for _ in range(3):
                    adam.zero_grad(set_to_none=kind != "kept")
                    losses = []
                    for number in range(3):
                        model.set_requires_gradient_sync(kind != "held back" or number == 2)
                        loss = model(**data.pop())["loss"]
                        losses.append(loss.item())
                        (loss / 3).backward()
                    row = {"grad": model.embedding.weight.grad.full_tensor().clone()}
                    if clip:
                        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                    row["clipped"] = model.embedding.weight.grad.full_tensor().clone()
                    adam.step()
                    rows.append(row | {"loss": torch.tensor(losses).mean()})
            assert not [note for note in run.notes() if "dead and live" not in note], run.notes()
            np.savez(f"{path}.npz", **{k: torch.stack([row[k] for row in rows]) for k in rows[0]})
"""


def test_accumulation_into_a_sharded_gradient(tmp_path: Path) -> None:
    """FSDP2 adds to the local part of the gradient, or to one that no parameter has yet."""
    run_together(1, ONE_PROCESS, tmp_path, tmp_path)
    for path in sorted(tmp_path.glob("*.npz")):
        kept, ds = np.load(path), open_run(path.with_suffix(".zarr")).isel(step=slice(1, None))
        np.testing.assert_array_equal(ds.grad, kept["grad"], path.name)
        np.testing.assert_array_equal(ds.grad * ds.clip_coef, kept["clipped"], path.name)
        np.testing.assert_allclose(ds.loss, kept["loss"], rtol=1e-6, err_msg=path.name)
    assert len(list(tmp_path.glob("*.npz"))) == 6


HEAD = """
    import os, sys
    import numpy as np, torch
    from trainings import TinyModel
    path, folder = sys.argv[1:]
    rank = int(os.environ["RANK"])

    def batch(step, rank):
        g = torch.Generator().manual_seed(100 * step + rank)
        return torch.randint(0, 17, (2, 5), generator=g)

    torch.manual_seed(0)
    model = TinyModel()
    model.mix = torch.nn.Identity()  # the embedding alone is trained
"""

LOOP = """
    from torch.nn.parallel import DistributedDataParallel
    from trajstore.trainers import capture
    torch.distributed.init_process_group("gloo")
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    expected = []
    variables = ("matrix", "batch", "example_loss", "hidden_states", "hidden_mean")
    with capture(wrapped, optimizer, path, variables=variables, max_grad_norm=0.1) as run:
        for step in range(5):
            grads = []
            for other in range(2):
                ids = batch(step, other)
                model.eval()  # so that it is not taken for a micro-batch
                loss = model(ids, ids)["loss"]
                model.train()
                grads.append(torch.autograd.grad(loss, model.embedding.weight)[0])
            expected.append((grads[0] + grads[1]) / 2)
            run.observe(loss=torch.tensor(float(step)), logits=torch.zeros(1, 17))
            run.observe(batch=[10 * step + rank, 7], example_loss=[float(rank), 0.5])
            optimizer.zero_grad()
            ids = batch(step, rank)
            wrapped(ids, ids)["loss"].backward()
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
            optimizer.step()
        assert run.step == 5
    np.save(f"{folder}/expected{rank}.npy", torch.stack(expected).numpy())
    np.save(f"{folder}/last{rank}.npy", model.embedding.weight.detach().numpy())
    torch.distributed.destroy_process_group()
"""

TRAINER = """
    from transformers import Trainer, TrainingArguments
    from trajstore.trainers import TrajectoryCallback

    class Keeping(Trainer):
        kept = []
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.kept.append(self.model.embedding.weight.grad.clone())
            return loss

    trainer = Keeping(
        model=model,
        args=TrainingArguments(
            output_dir=folder, max_steps=5, per_device_train_batch_size=2, use_cpu=True,
            ddp_backend="gloo", save_strategy="no", report_to="none", disable_tqdm=True,
            logging_strategy="no", dataloader_pin_memory=False, max_grad_norm=0.1,
        ),
        train_dataset=[{"input_ids": batch(i, 0)[0], "labels": batch(i, 1)[0]} for i in range(40)],
        callbacks=[TrajectoryCallback(path)],
    )
    trainer.train()
    np.save(f"{folder}/expected{rank}.npy", torch.stack(trainer.kept).numpy())
    np.save(f"{folder}/last{rank}.npy", model.embedding.weight.detach().numpy())
    torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("body", [LOOP, TRAINER], ids=["capture", "Trainer"])
def test_two_processes_one_store(body: str, tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    run_together(2, textwrap.dedent(HEAD) + textwrap.dedent(body), tmp_path, path, tmp_path)
    ds = xr.open_zarr(path)
    if body is LOOP:  # of both processes, the first one's before
        for step in range(5):
            row = ds.isel(step=step + 1)
            assert row.batch.values.tolist() == [10 * step, 7, 10 * step + 1, 7]
            assert row.example_loss.values.tolist() == [0, 0.5, 1, 0.5]
            states = row.hidden_states.values
            np.testing.assert_allclose(states[:2].mean((0, 1)), row.hidden_mean, rtol=1e-5)
            assert len(np.unique(states[2:])) > 4
    assert [p.name for p in tmp_path.glob("*.zarr")] == ["run.zarr"]
    assert ds.step.values.tolist() == list(range(6))
    expected = np.load(tmp_path / "expected0.npy")
    np.testing.assert_allclose(ds.grad.values[1:], expected, rtol=1e-5, atol=1e-8)
    for rank in range(2):
        assert np.array_equal(ds.W.values[-1], np.load(tmp_path / f"last{rank}.npy"))
    norms = np.sqrt((ds.grad.values[1:].astype("f8") ** 2).sum((1, 2)))
    np.testing.assert_allclose(ds.grad_norm.values[1:], norms, rtol=1e-5)
    assert (ds.clip_coef.values[1:] < 1).all()

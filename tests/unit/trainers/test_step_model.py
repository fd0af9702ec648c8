"""Models of recorded steps have the recorded bits, in memory, in a loop and in a folder."""

from __future__ import annotations

import inspect
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from trajstore import sample_run
from trajstore.cli.main import main
from trajstore.errors import InvalidArgument, RunExists, StepNotFound, VariableNotRecorded

torch = pytest.importorskip("torch")
import transformers  # noqa: E402
from altered_runs import change_attributes  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from small_trainings import contents  # noqa: E402
from trainings import (  # noqa: E402
    RECORDED_STEPS,
    STEPS,
    Accumulated,
    OwnModel,
    gpt2,
    record_gpt2,
    same,
)
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from trajstore.errors import NothingToResume  # noqa: E402
from trajstore.trainers import (  # noqa: E402
    capture,
    checkout,
    model_at,
    models,
    restore,
)

pytestmark = pytest.mark.torch


def test_models_of_all_steps_are_one_that_changes_in_place(recorded: Any) -> None:
    first, before = None, torch.get_rng_state()
    for step, model in models(recorded.path):
        first = first or model
        assert model is first
        assert same(dict(model.state_dict()), dict(recorded.models[step])), step
        assert model.lm_head.weight is model.transformer.wte.weight
        assert not model.training
        model.train()  # undone at the next step, like the gradient
        model(torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()
        model.half()
    assert [step for step, _ in models(recorded.path, [5, 1])] == [1, 5]
    assert step == RECORDED_STEPS
    assert torch.equal(torch.get_rng_state(), before)


def test_buffers_and_flags_of_an_own_model(own: Any) -> None:
    for step, model in models(own.path, constructor=OwnModel):
        assert same(dict(model.state_dict()), dict(own.models[step])), step
        assert model.normalization.num_batches_tracked == step
        assert model.normalization.weight.grad is None
        assert [p.requires_grad for p in model.fixed.parameters()] == [False, False]
        model.half()  # replaces the buffers


def test_buffers_that_do_not_change_have_the_type_of_the_training(tmp_path: Any) -> None:
    config = transformers.LlamaConfig(
        vocab_size=17, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=16, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    trained = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(trained.parameters())
    ids = torch.arange(16)[None]
    with capture(trained, optimizer, tmp_path / "run.zarr", variables="everything"):
        trained(ids, labels=ids).loss.backward()
        optimizer.step()
    model = model_at(tmp_path / "run.zarr", 1)
    assert same(dict(model.named_buffers()), dict(trained.named_buffers()))
    assert same(model(ids).logits, trained.eval()(ids).logits)


def test_a_missing_constructor_and_a_wrong_one(own: Any, recorded: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"does not record the configuration.*constructor"):
        model_at(own.path, 1)
    with pytest.raises(InvalidArgument, match=r"returned str, expected a torch.nn.Module"):
        model_at(own.path, 1, constructor=lambda: "model")
    with pytest.raises(InvalidArgument, match=r"the run has no transformer.wte.weight.*more diff"):
        model_at(own.path, 1, constructor=gpt2)

    def untied() -> Any:
        model = gpt2()
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        return model

    with pytest.raises(InvalidArgument, match=r"wte.weight and lm_head.weight are one parameter"):
        model_at(recorded.path, 1, constructor=untied)


def test_another_version_of_transformers_is_named(
    recorded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = sys.modules["transformers"]  # imported again by tests
    version, run = transformers.__version__, Path(shutil.copytree(recorded.path, tmp_path / "run"))
    change_attributes(run, lambda root: root["model_config"].update(transformers="99.0"))

    class Renamed(transformers.GPT2LMHeadModel):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.transformer.other = self.transformer.ln_f
            del self.transformer.ln_f

    monkeypatch.setattr(used, "GPT2LMHeadModel", Renamed)
    with pytest.raises(InvalidArgument, match=rf"no transformer.other.*99.0.*{version}: install"):
        model_at(run, 1)
    monkeypatch.setattr(used, "GPT2LMHeadModel", None)
    with pytest.raises(InvalidArgument, match=rf"GPT2LMHeadModel.*{version} does not have.*99.0"):
        model_at(run, 1)


def test_a_missing_step_and_a_run_of_another_tier(recorded: Any, tmp_path: Any) -> None:
    with pytest.raises(StepNotFound, match=r"no row of step 9; the nearest: 6"):
        model_at(recorded.path, 9)
    with pytest.raises(StepNotFound, match=r"no row of step -1; the nearest: 0"):
        next(models(recorded.path, [2, -1]))
    with pytest.raises(InvalidArgument, match="got step='1', expected a whole number"):
        model_at(recorded.path, "1")
    with pytest.raises(InvalidArgument, match=r"got step=\[3\], expected a whole number"):
        model_at(recorded.path, [3])
    for steps in ([1.0], [True], ["1"], [[1]]):
        with pytest.raises(InvalidArgument, match=r"steps: got .* at position 0"):
            next(models(recorded.path, steps))
    run = sample_run(tmp_path / "run.zarr")
    with pytest.raises(VariableNotRecorded, match=r"not hold all parameters.*tier everything"):
        model_at(run, 1)
    part = record_gpt2(tmp_path, variables=("W", "params_grad")).path
    with pytest.raises(VariableNotRecorded, match="not hold all parameters"):
        model_at(part, 1)


def test_transformers_loads_the_model_the_tokenizer_and_the_optimizer(
    recorded: Any, tmp_path: Path
) -> None:
    found = checkout(recorded.path, tmp_path / "step", step=4, optimizer=True)
    model = AutoModelForCausalLM.from_pretrained(found.path)
    assert same(dict(model.state_dict()), dict(recorded.models[4]))
    assert model.generation_config.eos_token_id is None
    text = "a 'b' , c .\n\t" + "".join(map(chr, range(128)))
    tokenizer = AutoTokenizer.from_pretrained(found.path)
    assert tokenizer(text)["input_ids"] == [*text.encode()]
    assert tokenizer.decode([*text.encode()]) == text
    with pytest.raises(Exception, match="UNK"):
        tokenizer("é")
    assert same(torch.load(found.path / "optimizer.pt"), recorded.optimizers[4])
    assert (found.tokenizer, found.notes) == ("ascii", ())
    with pytest.raises(RunExists, match="already exists"):
        checkout(recorded.path, tmp_path / "step", step=4)


def test_a_model_that_transformers_cannot_load(own: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"give constructor=…"):
        checkout(own.path, tmp_path / "step", step=4)
    assert [*tmp_path.iterdir()] == []
    checkout(own.path, tmp_path / "step", step=3, constructor=OwnModel)
    command = ["checkout", str(own.path), "--at", "4", "-o", str(tmp_path / "step"), "--overwrite"]
    build = f"{inspect.getsourcefile(OwnModel)}:OwnModel"
    done = CliRunner().invoke(main, [*command, "--constructor", build])
    assert "Wrote" in done.stdout
    assert "model.pt of step 4" in done.stdout
    model = OwnModel()
    model.load_state_dict(torch.load(tmp_path / "step" / "model.pt"))
    assert same(dict(model.state_dict()), dict(own.models[4]))


@pytest.mark.parametrize("name", ["step.PTH", "step.safetensors"])
def test_the_weights_of_a_step_in_a_file(
    name: str, own: Any, recorded: Any, tmp_path: Path
) -> None:
    told = shutil.copytree(recorded.path, tmp_path / "told.zarr")
    CliRunner().invoke(main, ["annotate", str(told), "--tokenizer", "ascii"])
    facts = json.loads((told / "zarr.json").read_text())
    facts["attributes"]["config"] = {"data": {"target_offset": 2}}
    (told / "zarr.json").write_text(json.dumps(facts))
    file = tmp_path / name
    assert checkout(own.path, file, step=4, constructor=OwnModel).strict
    words = ["checkout", str(own.path), "--at", "4", "-o", str(file), "--overwrite"]
    assert ", strict=False)" in CliRunner().invoke(main, words).stdout
    for run, kept, model, strict in (
        (own.path, own.models[4], OwnModel(), False),  # with buffers
        (told, recorded.models[4], gpt2(), True),  # with tied weights
    ):
        found = checkout(run, file, step=4, overwrite=True)
        model.load_state_dict(torch.load(file) if name == "step.PTH" else load_file(file))
        assert same(dict(model.state_dict()), dict(kept))
        assert found.strict == strict == (not any("never changed" in n for n in found.notes))
        (other := tmp_path / "other").touch()
        assert file.stat().st_mode == other.stat().st_mode
    with pytest.raises(InvalidArgument, match=r"expected a folder, NAME\.pt or NAME\.safetensors"):
        checkout(own.path, tmp_path / "step.bin", step=4)
    assert any("the token after next" in note for note in found.notes)
    if name == "step.PTH":
        assert "the file has no token_text" in found.notes[-1]
    else:
        with safe_open(file, "pt") as opened:
            assert json.loads(opened.metadata()["token_text"])[ord("a")] == "a"
    with pytest.raises(InvalidArgument, match="weights only; give a folder"):
        checkout(own.path, file, step=4, optimizer=True, overwrite=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A loop with dropout and buffers."""
    Accumulated().train(path := tmp_path / "run.zarr", variables="everything")
    return path


def test_what_cannot_be_restored(run: Path, tmp_path: Path) -> None:
    loop = Accumulated()
    with pytest.raises(InvalidArgument, match=f"does not hold step {STEPS + 1}"):
        restore(run, loop.model, loop.optimizers, step=STEPS)  # it draws numbers
    other = torch.optim.RAdam(loop.model.parameters())
    with pytest.raises(InvalidArgument, match=r"the optimizer is RAdam, and that of .* was SGD"):
        restore(run, loop.model, other)
    with pytest.raises(InvalidArgument, match=r"embedding.weight is float64 in the model"):
        restore(run, loop.model.double(), loop.optimizers)


def test_rows_with_a_next_step_can_be_restored(tmp_path: Path) -> None:
    options: dict[str, Any] = {"variables": "everything", "every": 3}
    for name, last in (("run.zarr", STEPS), ("none.zarr", 3)):
        Accumulated().train(tmp_path / name, last=last, **options)
    loop = Accumulated()
    assert restore(tmp_path / "run.zarr", loop.model, loop.optimizers) == 6
    with pytest.raises(InvalidArgument, match=r"does not hold step 4, .* restore step 6"):
        restore(tmp_path / "run.zarr", loop.model, loop.optimizers, step=3)
    with pytest.raises(InvalidArgument, match="no step that can be restored"):
        restore(tmp_path / "none.zarr", loop.model, loop.optimizers)


def test_a_resume_compares_the_whole_state(run: Path) -> None:
    loop, before = Accumulated(), contents(run)
    restore(run, loop.model, loop.optimizers, step=3)
    loop.optimizers.state[loop.model.sometimes.weight]["momentum_buffer"][0, 0] += 1
    loop.model.normalization.running_mean[1] = 2
    with pytest.raises(
        NothingToResume, match="buffers, params_momentum_buffer of the training differ"
    ):
        loop.train(run, first=3, resume=True, variables="everything")
    assert contents(run) == before

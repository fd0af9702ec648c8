from __future__ import annotations

from typing import Any

import pytest

from trajstore import sample_run
from trajstore.errors import InvalidArgument, StepNotFound, VariableNotRecorded

torch = pytest.importorskip("torch")
import transformers  # noqa: E402
from recorded_models import STEPS, OwnModel, gpt2, record_gpt2, same  # noqa: E402

from trajstore.trainers import capture, model_at, models  # noqa: E402

pytestmark = pytest.mark.torch


def test_a_model_has_the_bits_that_torch_kept(recorded: Any) -> None:
    before = torch.get_rng_state()
    model = model_at(recorded.path, 3)
    assert same(dict(model.state_dict()), dict(recorded.models[3]))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not model.training
    assert model.config.n_layer == 2
    assert torch.equal(torch.get_rng_state(), before)


def test_models_of_all_steps_are_one_that_changes_in_place(recorded: Any) -> None:
    first = None
    for step, model in models(recorded.path):
        first = first or model
        assert model is first
        assert same(dict(model.state_dict()), dict(recorded.models[step])), step
        model.train()  # undone at the next step, like the gradient
        model(torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()
        model.half()
    assert [step for step, _ in models(recorded.path, [5, 1])] == [1, 5]
    assert step == STEPS


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
    recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = "trajstore.trainers.step_models.step_model.transformers"  # tests may import it again
    version = transformers.__version__
    monkeypatch.setattr(f"{used}.__version__", "99.0")

    class Renamed(transformers.GPT2LMHeadModel):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.transformer.other = self.transformer.ln_f
            del self.transformer.ln_f

    monkeypatch.setattr(f"{used}.GPT2LMHeadModel", Renamed)
    with pytest.raises(InvalidArgument, match=rf"no transformer.other.*{version}.*99.0: install"):
        model_at(recorded.path, 1)
    monkeypatch.setattr(f"{used}.GPT2LMHeadModel", None)
    with pytest.raises(InvalidArgument, match=rf"GPT2LMHeadModel.*99.0 does not have.*{version}"):
        model_at(recorded.path, 1)


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

"""Metrics of layers, and gradients and logits that rows predict, against their definitions."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
import xarray as xr
from bits_and_calls import parameter_table

from trajstore import analysis
from trajstore.analysis.layer_metrics import METRICS
from trajstore.analysis.several_quantities import compute_named
from trajstore.errors import InvalidArgument, StepNotFound, VariableNotRecorded

ROWS, MODEL, HEADS = 6, 8, 4
SHAPES = {
    "wte": [5, MODEL],
    "h.0.attn.c_attn.weight": [MODEL, 3 * MODEL],
    "h.0.attn.c_proj.weight": [MODEL, MODEL],
    "bias": [7],
    "conv": [3, 2, 2],
}


def values_of(run: xr.Dataset, name: str, kind: str = "params") -> np.ndarray:
    """All rows of a parameter in float64."""
    (entry,) = (one for one in run.attrs["parameters"] if one["name"] == name)
    if entry["variable"] == "W":
        return run["W" if kind == "params" else "grad"].values.astype("f8")
    start = entry["offset"]
    part = run[kind].values[:, start : start + int(np.prod(entry["shape"]))]
    return part.reshape(len(part), *entry["shape"]).astype("f8")


@pytest.fixture
def run() -> xr.Dataset:
    """A run with a few unchanged elements, in memory."""
    rng = np.random.default_rng(1)
    offset = sum(int(np.prod(shape)) for name, shape in SHAPES.items() if name != "wte")

    def walk(*shape: int) -> np.ndarray:
        moves = rng.normal(size=(ROWS, *shape)) * (rng.random((ROWS, *shape)) < 0.7)
        return moves.cumsum(0).astype("f4")

    grad = walk(offset)
    grad[0] = np.nan
    element, matrix = ("step", "element"), ("step", "token", "hidden")
    ds = xr.Dataset(
        {
            "W": (matrix, walk(5, MODEL)),
            "grad": (matrix, walk(5, MODEL)),
            "params": (element, walk(offset)),
            "params_grad": (element, grad),
        },
        {"step": np.arange(ROWS) * 2, "token": np.arange(5)},
        {
            "parameters": parameter_table(SHAPES, "wte"),
            "model_config": {"config": {"n_head": HEADS}},
        },
    )
    return ds.chunk(step=4, element=50, token=3)


def same_bits(x: np.ndarray, y: np.ndarray) -> float:
    return (x.copy().view("u8") == y.copy().view("u8")).mean()


def expected_of(x: np.ndarray) -> dict[str, float]:
    """The definitions, written down once more."""
    flat = np.abs(x.ravel())
    s = np.linalg.svd(x.reshape(len(x), -1), compute_uv=False) if x.ndim > 1 else np.array([np.nan])
    p = s / s.sum()
    pairs = np.abs(flat[:, None] - flat).sum()
    return {
        "frobenius": np.sqrt((x**2).sum()),
        "spectral": s[0],
        "rms": np.sqrt((x**2).mean()),
        "effective_rank": np.prod(p**-p),
        "effective_rank_share": np.prod(p**-p) / len(s),
        "stable_rank": (s**2).sum() / s[0] ** 2,
        "condition_number": s[0] / s[-1],
        "gini": pairs / (2 * flat.size * flat.sum()),
        "hoyer": (flat.size**0.5 - flat.sum() / (flat**2).sum() ** 0.5) / (flat.size**0.5 - 1),
    }


@pytest.mark.parametrize("of", ["params", "grad", "update"])
def test_every_metric_of_every_parameter(run, of):
    found = analysis.layers(run, of).compute()
    assert [*found] == [*METRICS]
    assert found.parameter.values.tolist() == [*SHAPES]
    for name in SHAPES:
        values = values_of(run, name, "params_grad" if of == "grad" else "params")
        for row in range(1, ROWS):
            now, before = values[row], values[row - 1]
            expected = expected_of(now - before if of == "update" else now)
            expected["unchanged"] = same_bits(now, before)
            for metric, number in expected.items():
                np.testing.assert_allclose(found[metric].sel(parameter=name)[row], number, 1e-10)
    assert found.isel(step=0).unchanged.isnull().all()
    assert (found.isel(step=0).rms.isnull().sum() > 0) == (of != "params")
    assert 0 < found.unchanged.mean() < 1
    assert found.frobenius.attrs["units"] == ("nat" if of == "grad" else "1")


def test_special_matrices():
    stack = np.stack([np.eye(3), np.diag([1, 1, 0]), np.zeros((3, 3)), np.full((3, 3), np.inf)])
    table = parameter_table({"w": [3, 3]}, "w", "float64")
    steps = {"step": np.arange(4), "token": np.arange(3)}
    made = xr.Dataset({"W": (("step", "token", "hidden"), stack)}, steps, {"parameters": table})
    found = analysis.layers(made).isel(parameter=0).compute()
    np.testing.assert_array_equal(found.condition_number, [1, np.inf, np.inf, np.nan])
    np.testing.assert_allclose(found.effective_rank, [3, 2, np.nan, np.nan])
    np.testing.assert_allclose(found.gini, [2 / 3, 7 / 9, 0, np.nan])
    np.testing.assert_allclose(found.stable_rank, [3, 2, np.nan, np.nan])


def test_only_the_chosen_rows_are_read(run):
    def refuse(block):
        raise AssertionError("read")

    def only(*kept: int) -> xr.Dataset:
        rows = {}
        for name in ("W", "params"):
            parts = [run[name].data[at : at + 1] for at in range(ROWS)]
            for at in {*range(ROWS)} - {*kept}:
                parts[at] = parts[at].map_blocks(refuse, dtype="f4")
            rows[name] = run[name].copy(data=da.concatenate(parts))
        return run.assign(rows)

    found = compute_named(only(1, 4), ["layers"], ["metrics=rms,gini"], steps="8,2")
    assert found.step.values.tolist() == [2, 8]
    xr.testing.assert_equal(found, analysis.layers(run, metrics=["rms", "gini"], steps=[2, 8]))
    expected = analysis.layers(run, "update", "rms").sel(step=[4, 10])
    changed = analysis.layers(only(1, 2, 4, 5), "update", "rms", [4, 10])
    xr.testing.assert_equal(changed, expected)
    with pytest.raises(AssertionError, match="read"):
        analysis.layers(only(1), "update", "rms", 2).compute()


def test_circuits_of_a_gpt2(run):
    joint, output = (values_of(run, f"h.0.attn.{name}.weight")[3] for name in ("c_attn", "c_proj"))
    query, key, value = np.split(joint, 3, axis=1)
    for of in ("ov", "qk"):
        found = analysis.layers(run, of).compute()
        assert found.parameter.values.tolist() == [f"h.0.attn.head.{head}" for head in range(HEADS)]
        for head in range(HEADS):
            part = slice(2 * head, 2 * head + 2)
            whole = {
                "ov": value[:, part] @ output[part],
                "qk": query[:, part] @ key[:, part].T,
            }[of]
            singular = np.linalg.svd(whole, compute_uv=False)[:2]
            expected = expected_of(whole) | {"condition_number": singular[0] / singular[1]}
            expected["effective_rank"] = np.prod((p := singular / singular.sum()) ** -p)
            expected["effective_rank_share"] = expected["effective_rank"] / 2
            for metric, number in expected.items():
                np.testing.assert_allclose(found[metric][3, head], number, rtol=1e-9)
            rms = analysis.layers(run, of, "rms", 6).rms[0, head]  # without the elements
            np.testing.assert_allclose(rms, expected["rms"])
        assert found.unchanged[0].isnull().all()


def test_circuits_of_other_models():
    """Grouped queries, weights of torch.nn.Linear, and key and value in one parameter."""
    rng = np.random.default_rng(0)
    size, heads, groups = 3, 4, 2
    weights = {
        "q": rng.normal(size=(heads * size, MODEL)),
        "kv": rng.normal(size=(2 * groups * size, MODEL)),
        "o": rng.normal(size=(MODEL, heads * size)),
    }
    flat = np.concatenate([values.ravel() for values in weights.values()])
    shapes = {f"layers.7.{name}": values.shape for name, values in weights.items()}
    table = parameter_table(shapes, dtype="float64")
    ds = xr.Dataset(
        {"params": (("step", "element"), flat[None])}, {"step": [0]}, {"parameters": table}
    )
    names = {"query": "q", "key": "kv", "value": "kv", "output": "o"}
    names = {role: f"layers.{{layer}}.{name}" for role, name in names.items()}
    named = analysis.Attention(**names, heads=heads, kv_heads=groups)
    key, value = np.split(weights["kv"], 2)
    found = {of: analysis.layers(ds, of, "spectral", attention=named) for of in ("ov", "qk")}
    assert found["ov"].parameter.values.tolist() == [f"layers.7.head.{head}" for head in range(4)]
    for head in range(heads):
        own = slice(size * head, size * (head + 1))
        group = slice(size * (head // 2), size * (head // 2 + 1))
        ov = weights["o"][:, own] @ value[group]
        qk = weights["q"][own].T @ key[group]
        for of, matrix in (("ov", ov), ("qk", qk)):
            expected = np.linalg.norm(matrix, 2)
            np.testing.assert_allclose(found[of].spectral[0, head], expected)
    for given, message in (
        ({"heads": 5}, r"layers.{layer}.q has 12 dimensions for 5 heads"),
        ({"heads": 4, "kv_heads": 3}, "got kv_heads=3 for heads=4"),
        ({"heads": 1, "query": "q"}, "no parameter is named 'q' with a number"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            analysis.layers(ds, "qk", attention=analysis.Attention(**names | given))
    with pytest.raises(InvalidArgument, match="not of a GPT-2 of transformers"):
        analysis.layers(ds, "ov")


def test_recorded_norms_serve_for_the_frobenius_norm(run):
    norms = xr.DataArray(np.ones((ROWS, 5), "f4"), dims=("step", "parameter"))
    with_norms = run.assign(param_norm=norms, param_grad_norm=2 * norms).assign_coords(
        parameter=[*SHAPES]
    )
    assert (analysis.layers(with_norms, metrics="frobenius").frobenius == 1).all()
    of_one_step = with_norms.assign(param_update_norm=3 * norms)  # rows are two steps apart
    changes = analysis.layers(of_one_step, "update", ["frobenius", "rms"])[["frobenius"]]
    xr.testing.assert_equal(analysis.layers(of_one_step, "update", "frobenius"), changes)
    alone = with_norms[["param_grad_norm"]].drop_attrs()
    found = analysis.layers(alone, "grad", "frobenius", steps=[4])
    assert found.frobenius.values.tolist() == [[2.0] * 5]
    assert (found.frobenius.dtype, found.frobenius.attrs["units"]) == ("f8", "nat")


def test_layers_refuse(run):
    names = dict.fromkeys(("query", "key", "value", "output"), "q")
    attention = {"attention": analysis.Attention(**names, heads=1)}
    without = run.drop_vars("params_grad")
    norms = {"metrics": "frobenius"}
    for ds, options, error, message in (
        (run, {"metrics": ["rms", "ginni"]}, InvalidArgument, r"\(did you mean 'gini'\?\), exp"),
        (run, {"metrics": []}, InvalidArgument, r"got metrics=\[\]"),
        (run, {"steps": 3}, StepNotFound, "step 3"),
        (run, attention, InvalidArgument, "got attention for of='params'"),
        (without, {"of": "grad"}, VariableNotRecorded, "params_grad.*'everything'"),
        (run.drop_attrs(), {}, VariableNotRecorded, "one matrix only"),
        (run[["grad"]].drop_attrs(), norms, VariableNotRecorded, r"param_norm.*variables='norms'"),
    ):
        with pytest.raises(error, match=message):
            analysis.layers(ds, **options)


TOKENS, HIDDEN, EXAMPLES, POSITIONS = 7, 3, 4, 5
DEAD = [2, 5, 6]


@pytest.fixture
def trained(make_run) -> xr.Dataset:
    """float32 rows with random gradients."""
    rng = np.random.default_rng(0)
    ds = make_run(
        rng.normal(size=(ROWS, TOKENS, HIDDEN)).astype("f4"),
        grad=rng.normal(size=(ROWS, TOKENS, HIDDEN)).astype("f4"),
        native="float32",
    )
    states = rng.normal(size=(ROWS, EXAMPLES, POSITIONS, HIDDEN)).astype("f4")
    return ds.assign(
        hidden_states=(("step", "example", "position", "hidden"), states),
        batch=(("step", "example"), rng.integers(0, 99, (ROWS, EXAMPLES)).astype("f8")),
    ).assign_coords(
        token=[4, 3, 6, 0, 1, 2, 5],
        is_dead=("token", [False, False, True, False, False, True, True]),
    )


def by_hand(ds: xr.Dataset, step: int, token: int, last: int, count: float) -> np.ndarray:
    """Contribution of each example, (example, hidden)."""
    W = ds.W.sel(step=step - 1).values.astype("f8")
    states = ds.hidden_states.sel(step=step).values[:, :last].astype("f8")
    weights = np.exp(states @ W.T)
    p = weights[..., ds.token.values.tolist().index(token)] / weights.sum(-1)
    return np.nansum(p[..., None] * states, 1) / count


@pytest.mark.parametrize(("targets", "last"), [("shifted", POSITIONS - 1), ("all", POSITIONS)])
def test_position_by_position(trained, targets, last):
    trained.grad[3, 2] = by_hand(trained, 3, 6, last, EXAMPLES * last).sum(0)  # as explained
    found = analysis.explain_gradient(trained, [3, 1], DEAD, targets=targets).compute()
    assert found.step.values.tolist() == [3, 1]
    assert found.token.values.tolist() == DEAD
    np.testing.assert_array_equal(found.batch, trained.batch.sel(step=[3, 1]))
    for step in (3, 1):
        for token in DEAD:
            parts = by_hand(trained, step, token, last, EXAMPLES * last)
            made = parts.sum(0)
            grad = trained.grad.sel(step=step, token=token).values.astype("f8")
            one = found.sel(step=step, token=token)
            np.testing.assert_allclose(one.explained, np.linalg.norm(made))
            np.testing.assert_allclose(one.recorded, np.linalg.norm(grad))
            error = np.linalg.norm(made - grad) / np.linalg.norm(grad)
            np.testing.assert_allclose(one.relative_error, error, atol=1e-12)
            assert (error < 1e-6) == ((step, token) == (3, 6))
            cosine = made @ grad / np.linalg.norm(made) / np.linalg.norm(grad)
            np.testing.assert_allclose(one.cosine, cosine)
            np.testing.assert_allclose(one.share, parts @ made / (made @ made))
            assert one.share[one.by_share].values.tolist() == sorted(one.share.values)[::-1]


def test_missing_examples_and_positions_are_ignored(trained):
    states = trained.hidden_states.copy()
    states[2, 3] = np.nan  # one example fewer
    states[2, :, 4] = np.nan  # and a shorter text
    ds = trained.assign(hidden_states=states)
    found = analysis.explain_gradient(ds, 2, 5, targets="all").compute()[{"step": 0, "token": 0}]
    made = by_hand(ds, 2, 5, POSITIONS, 3 * 4).sum(0)
    np.testing.assert_allclose(found.explained, np.linalg.norm(made))
    assert np.isnan(found.share[3])
    assert found.by_share[3] == -1
    assert sorted(found.by_share.values[:3]) == [0, 1, 2]


def test_rounding_as_a_model_of_another_type(trained):
    exact, rounded = (
        analysis.explain_gradient(trained, 1, DEAD, precision=precision).explained.compute()
        for precision in ("float64", "bfloat16")
    )
    assert (exact != rounded).all()
    np.testing.assert_allclose(rounded, exact, rtol=0.02)


def test_from_the_command_line(trained):
    options = ["step=1,3", "token=6", "denominator=12"]
    found = compute_named(trained, ["explain_gradient"], options).compute()
    expected = analysis.explain_gradient(trained, [1, 3], 6, denominator=12).compute()
    xr.testing.assert_identical(found, expected)
    whole = analysis.explain_gradient(trained, [1, 3], 6).explained
    np.testing.assert_allclose(found.explained, whole * EXAMPLES * (POSITIONS - 1) / 12)


def test_what_cannot_be_explained_is_refused(trained):
    whole = trained.assign_attrs(recording={"vocabulary": 7})
    what_if = trained.assign_attrs(provenance={"what_if": {"run": "run.zarr"}})
    other = "got 3 of the vocabulary's 7 tokens"
    for ds, step, token, error, message in (
        (trained, 3, [5, 4], InvalidArgument, "got the live token 4, expected dead tokens"),
        (trained, 3, 9, InvalidArgument, "got token 9, expected tokens"),
        (trained, 17, 5, StepNotFound, "step 17 is not in the run"),
        (trained, 0, 5, StepNotFound, "before training"),
        (trained.isel(step=[0, 2, 4]), 4, 5, StepNotFound, "used W of step 3"),
        (trained.drop_vars("hidden_states"), 3, 5, VariableNotRecorded, "hidden_states"),
        (trained.drop_vars("is_dead"), 3, 5, VariableNotRecorded, "is_dead"),
        (trained.isel(token=[2, 5, 6]), 3, 5, InvalidArgument, other),
        (whole.sel(token=[0, 1, 2]), 3, 2, InvalidArgument, other),
        (what_if, 3, 5, InvalidArgument, "got a what-if run"),
    ):
        with pytest.raises(error, match=message):
            analysis.explain_gradient(ds, step, token)


def test_statistics_of_logits():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (7, 9)).astype(np.float32)
    logits[0] = np.nan
    logits[1] = 1.5
    logits[2, 3] = -np.inf
    logits[3] *= 1000  # its exponential overflows
    dead = np.arange(9) % 2 == 0
    ds = xr.Dataset(
        {"logits": (("step", "token"), logits)},
        coords={"step": np.arange(7), "token": np.arange(9), "is_dead": ("token", dead)},
    )
    got = analysis.logit_stats(ds).compute()
    wide = logits.astype(np.longdouble)
    with np.errstate(all="ignore"):
        weights = np.exp(wide - wide.max(1, keepdims=True))
        p = weights / weights.sum(1, keepdims=True)
        entropy = -np.where(p > 0, p * np.log(p), np.where(np.isnan(p), np.nan, 0)).sum(1)
        expected = {
            "entropy": entropy,
            "dead_mass": p[:, dead].sum(1),
            "logit_min": logits.min(1),
            "logit_max": logits.max(1),
            "logit_range": wide.max(1) - wide.min(1),
            "logit_std": logits.astype(float).std(1),
        }
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values.astype(float), 1e-7, 1e-12)
    assert "dead_mass" not in analysis.logit_stats(ds.drop_vars("is_dead"))
    with pytest.raises(VariableNotRecorded, match=r"logits.*weights"):
        analysis.logit_stats(ds.rename(logits="W"))
    with pytest.raises(InvalidArgument, match="expected step, token"):
        analysis.logit_stats(ds.expand_dims("hidden"))


def test_mean_logits_equal_the_product_of_W_and_the_mean_state(make_run, walk):
    bits = walk(8, 5, 4)
    bits[:, 3] = bits[:, 1]
    mean = np.random.default_rng(3).normal(size=(8, 4)).astype("f4")
    mean[0] = np.nan
    ds = make_run(bits, steps=np.array([0, 1, 2, 3, 5, 6, 7, 8]))
    with pytest.raises(VariableNotRecorded, match="hidden_mean"):
        analysis.mean_logits(ds)
    ds = ds.assign(hidden_mean=(("step", "hidden"), mean))
    got = analysis.mean_logits(ds, k=3).compute()
    expected = np.einsum("sth,sh->st", ds.W.values[:-1].astype(float), mean[1:].astype(float))
    np.testing.assert_allclose(got.mean_logit[[1, 2, 3, 5, 6, 7]], expected[[0, 1, 2, 4, 5, 6]])
    for row in (0, 4):  # without a row before, and without the step before
        assert got.mean_logit[row].isnull().all()
        assert (got.top_token[row] == -1).all()
        assert got.top_logit[row].isnull().all()
    for row in (1, 2, 3, 5, 6, 7):
        logits = expected[row - 1]
        order = sorted(range(5), key=lambda token: (-logits[token], token))[:3]
        assert got.top_token[row].values.tolist() == ds.token.values[order].tolist()
        np.testing.assert_allclose(got.top_logit[row], logits[order])
    with pytest.raises(InvalidArgument, match="k=6, expected 1 to 5"):
        analysis.mean_logits(ds, 6)

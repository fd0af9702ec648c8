"""Metrics of layers against NumPy, the rows that are read, circuits, and recorded norms."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
import xarray as xr
from parameter_tables import parameter_table

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


def expected_of(x: np.ndarray, before: np.ndarray) -> dict[str, float]:
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
        "unchanged": same_bits(x, before),
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
            expected = expected_of(now - before if of == "update" else now, before)
            if of == "update":
                expected["unchanged"] = same_bits(now, before)
            for metric, number in expected.items():
                np.testing.assert_allclose(found[metric].sel(parameter=name)[row], number, 1e-10)
    assert found.isel(step=0).unchanged.isnull().all()
    assert (found.isel(step=0).rms.isnull().sum() > 0) == (of != "params")
    assert 0 < found.unchanged.mean() < 1
    assert found.frobenius.attrs["units"] == ("nat" if of == "grad" else "1")
    one = analysis.layers(run, of, "spectral", 8)
    xr.testing.assert_equal(one, found[["spectral"]].sel(step=[8]))


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
    def without(*kept: int) -> xr.Dataset:
        def refuse(block):
            raise AssertionError("read")

        rows = {
            name: da.concatenate(
                [
                    run[name]
                    .data[row : row + 1]
                    .map_blocks(*([refuse] if row not in kept else [np.array]), dtype="f4")
                    for row in range(ROWS)
                ]
            )
            for name in ("W", "params")
        }
        return run.assign({name: run[name].copy(data=data) for name, data in rows.items()})

    metrics = [name for name in METRICS if name != "unchanged"]
    found = analysis.layers(without(1, 4), metrics=metrics, steps=[8, 2])
    assert found.compute().step.values.tolist() == [2, 8]
    expected = analysis.layers(run, "update").sel(step=[4, 10])
    analysis.layers(without(1, 2, 4, 5), "params", steps=[4, 10]).compute()
    xr.testing.assert_equal(analysis.layers(without(1, 2, 4, 5), "update", steps=[4, 10]), expected)
    through = compute_named(without(1, 4), ["layers"], ["metrics=gini,rms"], steps="2,8")
    xr.testing.assert_equal(through, found[["gini", "rms"]])
    with pytest.raises(AssertionError, match="read"):
        analysis.layers(without(1), "update", "rms", 2).compute()


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
            expected = expected_of(whole, whole) | {"condition_number": singular[0] / singular[1]}
            expected["effective_rank"] = np.prod((p := singular / singular.sum()) ** -p)
            expected["effective_rank_share"] = expected["effective_rank"] / 2
            del expected["unchanged"]
            for metric, number in expected.items():
                np.testing.assert_allclose(found[metric][3, head], number, rtol=1e-9)
            rms = analysis.layers(run, of, "rms", 6).rms[0, head]  # without the elements
            np.testing.assert_allclose(rms, expected["rms"])
        assert found.unchanged[0].isnull().all()


def test_circuits_of_other_models(run):
    """Grouped queries, weights of torch.nn.Linear, and key and value in one parameter."""
    rng = np.random.default_rng(0)
    size, heads, groups = 3, 4, 2
    shapes = {
        "q": (heads * size, MODEL),
        "kv": (2 * groups * size, MODEL),
        "o": (MODEL, heads * size),
    }
    weights = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    flat = np.concatenate([weights[name].ravel() for name in weights])
    table = parameter_table(
        {f"layers.7.{name}": shape for name, shape in shapes.items()}, dtype="float64"
    )
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
    five = analysis.Attention(**names, heads=5)
    with pytest.raises(InvalidArgument, match=r"layers.{layer}.q has 12 dimensions for 5 heads"):
        analysis.layers(ds, "qk", attention=five)
    with pytest.raises(InvalidArgument, match="got kv_heads=3 for heads=4"):
        analysis.Attention(**names, heads=4, kv_heads=3)
    with pytest.raises(InvalidArgument, match="not of a GPT-2 of transformers"):
        analysis.layers(ds, "ov")
    unknown = analysis.Attention(**names | {"query": "q"}, heads=1)
    with pytest.raises(InvalidArgument, match="no parameter is named 'q' with a number"):
        analysis.layers(ds, "qk", attention=unknown)


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
    with pytest.raises(VariableNotRecorded, match=r"param_norm.*variables='norms'"):
        analysis.layers(alone, metrics="frobenius")


def test_what_is_refused(run):
    with pytest.raises(InvalidArgument, match=r"\['rms', 'ginni'\] \(did you mean 'gini'\?\), exp"):
        analysis.layers(run, metrics=["rms", "ginni"])
    with pytest.raises(InvalidArgument, match=r"got metrics=\[\]"):
        analysis.layers(run, metrics=[])
    with pytest.raises(StepNotFound, match="step 3"):
        analysis.layers(run, steps=3)
    with pytest.raises(VariableNotRecorded, match="one matrix only"):
        analysis.layers(run.drop_attrs())
    with pytest.raises(VariableNotRecorded, match=r"params_grad.*variables='everything'"):
        analysis.layers(run.drop_vars("params_grad"), "grad")
    names = {"query": "q", "key": "k", "value": "v", "output": "o"}
    with pytest.raises(InvalidArgument, match="got attention for of='params'"):
        analysis.layers(run, attention=analysis.Attention(**names, heads=1))

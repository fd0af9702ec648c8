"""Several quantities together, and properties of all quantities."""

from __future__ import annotations

import inspect
import pickle
from collections import Counter
from collections.abc import Iterable
from functools import partial

import cloudpickle
import dask
import numpy as np
import pytest
import xarray as xr
from bits_and_calls import parameter_table

from trajstore import analysis
from trajstore.analysis.results.write_results import describe
from trajstore.analysis.scan.result_variables import NO_ROW_BEFORE, flags_of, with_flag
from trajstore.analysis.scan.scan import Scan
from trajstore.analysis.several_quantities import ALONE, QUANTITIES, compute_named
from trajstore.errors import InvalidArgument, TrajstoreError, VariableNotRecorded
from trajstore.exchange.selection import select_part

NAMES = list(QUANTITIES)


@pytest.fixture(scope="module")
def run(adam_run):
    states = np.random.default_rng(1).normal(size=(23, 2, 3, 6)).astype(np.float32)
    ds = adam_run.assign(
        clip_coef=("step", np.ones(23, np.float32)),
        hidden_mean=(("step", "hidden"), states[:, 0, 0]),
        hidden_states=(("step", "example", "position", "hidden"), states),
        batch=(("step", "example"), np.arange(46).reshape(23, 2)),
    ).assign_coords(is_tracer=("token", np.arange(11) % 4 == 1), token=np.arange(11) * 3 % 11)
    return ds.assign_attrs(parameters=parameter_table({"wte": [11, 6]}, "wte"))


REQUIRED = {"nearest_tokens": {"tokens": [3, 9]}, "explain_gradient": {"step": 8, "token": [7]}}
"""Options of quantities that have no defaults, or that have too many results without."""


def results_alone(ds: xr.Dataset, names: Iterable[str]) -> dict[str, xr.DataArray | xr.Dataset]:
    """The result of the function of each quantity."""
    return {name: getattr(analysis, name)(ds, **REQUIRED.get(name, {})) for name in names}


def arrays_of(results: dict[str, xr.DataArray | xr.Dataset]) -> dict[str, dict[str, xr.DataArray]]:
    return {
        name: {name: result} if isinstance(result, xr.DataArray) else dict(result.data_vars)
        for name, result in results.items()
    }


@pytest.fixture(scope="module")
def alone(run):
    return arrays_of(dask.compute(results_alone(run, QUANTITIES | ALONE))[0])


def check_with_every_step(together: xr.DataArray, alone: xr.DataArray) -> None:
    """Equal results; in a first row without a value, integers have a flag."""
    if "step" in alone.dims:
        padded = alone.dtype.kind == "i" and alone.sizes["step"] < together.sizes["step"]
        alone = with_flag(alone, -1, NO_ROW_BEFORE) if padded else alone
        together = together.sel(step=alone.step)
    xr.testing.assert_identical(together, alone)


def test_no_chunks_no_scheduler_and_no_order_of_dimensions_changes_a_bit(run, alone):
    in_blocks = run.assign(
        W=run.W.chunk(step=(0, 1, 8, 0, 8, 1, 5, 0), token=6, hidden=4),
        grad=run.grad.chunk(step=7),
        hidden_states=run.hidden_states.chunk(step=5, example=1, position=2),
        exp_avg=run.exp_avg.chunk(token=2),
        exp_avg_sq=run.exp_avg_sq.chunk(step=3, hidden=2),
    )
    turned = in_blocks.transpose("hidden", "token", "step", ...)
    results = results_alone(turned, QUANTITIES | ALONE)
    assert all(
        array.chunks is not None
        for found in arrays_of(results).values()
        for array in found.values()
    ), "lazy"
    results = pickle.loads(cloudpickle.dumps(results))  # as a cluster does
    (results,) = dask.compute(results, scheduler="sync")
    for name, found in arrays_of(results).items():
        assert list(found) == list(alone[name])
        for key, array in found.items():
            xr.testing.assert_identical(array, alone[name][key])


# What a token has in these also depends on other tokens, in all others on itself alone.
OF_OTHER_TOKENS = {
    *("cosine", "angle", "projection", "across", "scores", "latitude", "longitude"),
    "nearest_distance",
}


def test_selected_tokens_have_the_values_that_they_have_in_the_whole_run(run, alone):
    chosen = [7, 1, 4, 10, 2, 8, 5, 6, 3, 9]
    (found,) = dask.compute(results_alone(run.isel(token=chosen), NAMES))
    changed = {
        key
        for name, arrays in arrays_of(found).items()
        for key, array in arrays.items()
        if "token" in array.dims and not array.identical(alone[name][key].isel(token=chosen))
    }
    assert changed == OF_OTHER_TOKENS


ON_LATTICES = [
    name
    for name, quantity in QUANTITIES.items()
    if "lattice" in quantity.options and not quantity.only_native
]


def test_cells_take_the_place_of_weights_that_are_not_there(run):
    W = run.W.astype(np.float64) * (1 + 2.0**-12)
    masters = run.assign(W=W.astype(np.float32).assign_attrs(run.W.attrs, native_dtype="float32"))
    cells = masters.drop_vars("W").assign(cells=run.W)
    for name in set(ON_LATTICES) - {"freeze_cause"}:
        got, expected = (
            getattr(analysis, name)(ds, lattice="bfloat16").compute() for ds in (cells, masters)
        )
        assert got.equals(expected), name
    places = {"metric": "ordinal", "ord": 1, "lattice": "bfloat16"}
    got = analysis.lattice_displacement(cells, **places)
    assert got.equals(analysis.lattice_displacement(masters, **places))
    for ds, lattice, message in (
        (cells, "native", "use lattice='bfloat16'"),
        (cells, "float16", "'float16' requires W"),
        (cells.drop_vars("cells"), "bfloat16", "requires W"),
    ):
        with pytest.raises(VariableNotRecorded, match=message):
            analysis.freeze(ds, lattice=lattice)


def test_where_there_is_no_row_before_nothing_is_claimed(run):
    names = ["regimes", "freeze", "discontinuities", "speed"]
    first = analysis.compute(run, names).isel(step=0).compute()
    assert (first.regime == -1).all()
    assert flags_of(first.counts) == {-1: "no_row_before"}
    assert flags_of(first.regime) == {-1: "no_row_before"} | dict(enumerate(analysis.REGIMES))
    assert first[["unchanged_fraction", "speed"]].isnull().all().all()
    assert not first.discontinuity.any()


def test_categories_are_counted_by_population(run):
    cause = analysis.freeze_cause(run).values
    tokens = compute_named(run, ["freeze_cause"], by_population=True).tokens
    for number, name in enumerate(analysis.CAUSES):
        counted = tokens.sel(population="dead", category=name)
        np.testing.assert_array_equal(counted, (cause[:, run.is_dead] == number).sum(1))


def counting(ds: xr.Dataset, chunks: dict[str, int]) -> tuple[xr.Dataset, Counter]:
    """A lazy copy, with a count of reads of each chunk."""
    reads: Counter = Counter()

    def counted(name: str) -> xr.DataArray:
        def read(block, block_info):
            if block_info:
                reads[name, tuple(block_info[0]["chunk-location"])] += 1
            return block

        array = ds[name].chunk({dim: size for dim, size in chunks.items() if dim in ds[name].dims})
        meta = np.empty((0,) * array.ndim, array.dtype)
        source = array.data.map_blocks(read, dtype=array.dtype, meta=meta, name=f"source-{name}")
        return array.copy(data=source)

    return ds.assign({name: counted(name) for name in ds if "token" in ds[name].dims}), reads


def test_each_chunk_is_read_once(run):
    many = (
        "grad_norms freeze regimes lifecycle discontinuities speed freeze_cause exact_moments "
        "moment_error moment_stuck freeze_attribution"
    )
    for names, lattice, read in (
        (many, "native", ["W", "grad", "exp_avg", "exp_avg_sq"]),
        ("freeze regimes speed discontinuities", "float16", ["W"]),
    ):
        ds, reads = counting(run, {"step": 8, "token": 6})
        with dask.config.set(scheduler="sync"):
            analysis.compute(ds, names.split(), lattice=lattice).compute()
        assert {name for name, _ in reads} == {*read}
        assert len(reads) == 3 * 2 * len(read)
        assert set(reads.values()) == {1}


def test_a_subset_reads_only_itself(run):
    ds, reads = counting(run, {"step": 5, "token": 4})
    analysis.displacement(ds.isel(token=slice(0, 4))).isel(step=-1).compute()
    assert {block for _, block in reads} == {(0, 0, 0), (4, 0, 0)}


def test_wrong_names_and_words_are_refused(run):
    single = {"lattice": "float16"}
    for names, words, options, message in (
        (["freeze", "entropy"], [], {}, "'entropy'.*grad_norms"),
        ([], [], {}, "no names"),
        ([["freeze"], "speed"], [], {}, "expected names of quantities"),
        (["nearest_tokens", "speed"], [], {}, "requires its own options"),
        (["explain_gradient"], ["step=1"], {}, "requires token"),
        (["freeze"], [], {"within": True}, "within without steps"),
        (["speed"], [], single, r"lattice='float16' for speed.*freeze_cause"),
        (["speed", "grad_norms"], [], single, "lattice='float16' for speed"),
        (["freeze"], ["lattice=float32"], single, "lattice twice, 'float16' and 'float32'"),
        (["clusters"], ["ranks=abc"], {}, "'ranks=abc', expected whole numbers"),
        (["clusters"], ["population=dead,live"], {}, r"got population=\('dead', 'live'\), exp"),
        (["adam_update"], ["optimizer=adam"], {}, "optimizer='adam', expected a mapping of str"),
        (["lifecycle", "lr", "grad_norms", "W"], [], {}, "got lifecycle, grad_norms, W without a"),
        (["lr"], [], {"by_population": True}, "options or populations with lr"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            compute_named(run, names, words, **options)


def test_recorded_variables_make_a_table_of_steps(run):
    ds = run.assign(loss=("step", np.linspace(4, 1, 23)))
    table = analysis.compute(ds, ["loss", "lr", "freeze", "distinct"], steps="9:17")
    assert set(table.dims) == {"step"}
    assert table.loss.identical(ds.loss.sel(step=table.step))
    distinct = analysis.distinct(ds).distinct.sel(population="dead", step=table.step)
    assert table.distinct_dead.values.tolist() == distinct.values.tolist()
    names = ["loss", "lr", "unchanged_fraction_dead", "frozen_fraction_all", "most_common_live"]
    assert {*names} <= {*table.to_dataframe()}
    assert list(compute_named(ds, ["loss"])) == ["loss"]
    assert "token" in analysis.compute(ds.assign(speed=ds.loss), ["speed", "distinct"]).dims
    with pytest.raises(VariableNotRecorded, match="loss"):
        analysis.compute(run, ["loss", "freeze"])


def test_a_quantity_takes_a_dataset_or_a_scan(run):
    parameters = inspect.signature(analysis.freeze).parameters
    assert list(parameters) == ["ds", "min_unchanged", "lattice", "per"]
    assert analysis.freeze(Scan(run), 2).identical(analysis.freeze(ds=run, min_unchanged=2))
    named = compute_named(run, ["ulp"], lattice="float16")
    assert named.identical(compute_named(run, ["ulp"], ["lattice=float16"]))


@pytest.mark.parametrize(
    ("names", "lattice"),
    [
        (["freeze", "regimes", "speed"], "native"),
        ([*ON_LATTICES, "speed"], "float16"),
        pytest.param(NAMES, "native", marks=pytest.mark.nightly),
    ],
)
def test_together_they_are_what_they_are_alone(names, lattice, run):
    run = run.isel(step=slice(12))
    together = analysis.compute(run.chunk(step=5, token=6), names, lattice=lattice).compute()
    assert together.sizes["step"] == 12
    for name in names:
        options = QUANTITIES[name].known(lattice=lattice)
        for arrays in arrays_of({name: getattr(analysis, name)(run, **options)}).values():
            for key, array in arrays.items():
                check_with_every_step(together[key], array)


def test_a_window_of_the_rows_of_a_parameter_shows_what_the_whole_run_of_tokens_gives(run, alone):
    shown = select_part(run, steps="2:20:3")["step"]
    of_rows = run.rename(token="row", hidden="column").chunk(step=8, row=6)
    got = analysis.compute(of_rows, NAMES, steps="2:20:3").compute()
    assert got.step.equals(shown)
    assert not {"token", "hidden"} & {*got.dims, *got.coords}
    said = [array.attrs for name, array in got.items() if name != "dead_mass"]
    assert "token" not in str(said).split()
    got = got.rename(row="token", column="hidden")
    for name in NAMES:
        for key, array in alone[name].items():
            if not QUANTITIES[name].of_window:
                if "step" not in array.dims:
                    xr.testing.assert_equal(got[key], array)
                else:
                    expected = array.sel(step=shown[shown.isin(array.step)])
                    xr.testing.assert_equal(got[key].sel(step=expected.step), expected)


def test_within_a_window_there_are_no_other_rows(run):
    names = [name for name in NAMES if QUANTITIES[name].of_window]
    names += ["centroid", "freeze", "regimes", "speed"]
    got = analysis.compute(run, names, steps="9:17", within=True)
    xr.testing.assert_identical(got, analysis.compute(run.isel(step=slice(9, 17)), names))
    names = names[:-4]
    shown = analysis.compute(run, names, steps="9:17")
    xr.testing.assert_identical(shown, got[list(shown)])


def test_quantities_of_a_single_row(run):
    found = analysis.compute(run.isel(step=[0]).chunk(), NAMES)
    assert {array.sizes["step"] for array in found.values() if "step" in array.dims} == {1}
    assert describe(found).keys() == set(map(str, found))


_EMPTY = (
    "bulk_thermal centroid coherence distinct alignment clusters adjacency nearest_distance "
    "projection pca inertia logit_stats grad_norms ulp moment_sizes"
).split()


@pytest.mark.parametrize("name", QUANTITIES)
def test_a_run_without_rows_or_tokens_has_empty_results_or_a_sentence(name, run):
    quantity = partial(getattr(analysis, name), run.isel(step=slice(0)))
    if name in _EMPTY:
        assert quantity().sizes["step"] == 0
    else:
        with pytest.raises((InvalidArgument, VariableNotRecorded), match="require"):
            quantity()
    with pytest.raises(InvalidArgument, match="got a Dataset without tokens"):
        getattr(run.isel(token=slice(0)).traj, name)()


@pytest.fixture(scope="module")
def token_run(make_run, walk):
    bits = walk(5, 4, 3)
    return make_run(bits, grad=bits.copy(), is_dead=[True, False, False, True])


OPTIONS = [
    (name, option, inspect.signature(quantity.function).parameters[option].default)
    for name, quantity in (QUANTITIES | ALONE).items()
    for option in quantity.options
]
# Those that need more than the run has, or whose message names two options.
OF_OTHERS = {"alignment", "freeze_cause", "grad_norms", "mean_logits"}
WRONG_VALUES = [
    *(
        (name, option, "sun" if isinstance(default, str) else 0)
        for name, option, default in OPTIONS
        if isinstance(default, str | int | float)
        if name not in OF_OTHERS and option != "neighbor"
    ),
    ("adjacency", "k", 1.5),
    ("autocorrelation", "lags", 0),
    ("autocorrelation", "lags", []),
    ("autocorrelation", "lags", [1, -2]),
    ("crossings", "levels", [np.nan]),
    ("discontinuities", "window", 1),
    ("explain_gradient", "denominator", 0),
    ("heatmap", "most_groups", 0),
    ("heatmap", "of", "speed"),
    ("nearest_tokens", "k", 10**9),
    ("nearest_tokens", "tokens", 77),
    ("path_efficiency", "window", 0),
    ("path_efficiency", "window", 5),
    ("pca", "components", 4),
    ("pca", "first", "grad"),
]


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [*((name, option, object()) for name, option, _ in OPTIONS), *WRONG_VALUES],
)
def test_quantities_refuse_an_option_of_a_wrong_type_or_value(name, option, value, token_run):
    required = (QUANTITIES | ALONE)[name].required if name != "heatmap" else ()
    with pytest.raises(TrajstoreError) as reported:
        getattr(analysis, name)(token_run, **{**dict.fromkeys(required, 1), option: value})
    assert isinstance(reported.value, InvalidArgument), reported.value
    assert option in str(reported.value)
    if (name, option, value) in WRONG_VALUES:
        assert f"got {option}={value!r}, expected" in str(reported.value)


def test_what_does_not_fit_together_is_refused(token_run):
    for name, options, part, message in (
        ("alignment", {"other": "delta", "of": "delta"}, {}, "two different vectors"),
        ("alignment", {"other": "sun"}, {}, "other='sun'"),
        ("alignment", {"quantiles": [2]}, {}, "quantiles"),
        ("autocorrelation", {}, {"step": [0, 1, 3]}, "evenly spaced rows, got spacings of 1, 2 s"),
        ("autocorrelation", {"lags": [1, 4]}, {}, "expected at most 3, "),
        ("autocorrelation", {"lags": 5, "of": "position"}, {}, "expected at most 4, "),
        ("crossings", {"quantity": "freeze"}, {}, r"freeze\.frozen_fraction"),
        ("crossings", {"quantity": "freeze.sun"}, {}, r"freeze\.unchanged_fraction"),
        ("crossings", {"quantity": "displacement.sun"}, {}, "expected displacement$"),
        ("crossings", {"quantity": "lifecycle.last_jump"}, {}, "expected lifecycle$"),
        ("crossings", {"quantity": xr.DataArray([1.0], dims="token")}, {}, "along step"),
        ("displacement", {"since": 24}, {}, "step 24"),
        ("displacement", {}, {"step": [0, 2, 1]}, "do not increase"),
        ("grad_norms", {"ord": 3}, {}, "order 3"),
        ("heatmap", {}, {"step": [0]}, "at least 2 rows"),
        ("pca", {"basis": 99}, {}, "step 99"),
        ("projection", {"axes": [1, 2]}, {}, r"shape \(2,\)"),
        ("projection", {"axes": xr.DataArray([1.0, 2], dims="hidden")}, {}, "hidden=3"),
        ("regimes", {"jump": 9, "far": 5}, {}, "neighbor=1, jump=9 and far=5, expected positive"),
        ("sky", {}, {"hidden": [0, 1]}, "at least 3 dimensions, got 2"),
        ("alignment", {"other": "hidden_mean"}, {}, "record it .*hidden_mean"),
        ("projection", {"axes": "hidden_mean"}, {}, "record it .*hidden_mean"),
        ("pca", {"first": "hidden_mean"}, {}, "record it .*hidden_mean"),
        ("sky", {"axis": "hidden_mean"}, {}, "record it .*hidden_mean"),
    ):
        with pytest.raises(TrajstoreError, match=message):
            getattr(analysis, name)(token_run.isel(part), **options)
    with pytest.raises(VariableNotRecorded, match="grad"):
        analysis.alignment(token_run.drop_vars("grad"), "grad")
    with pytest.raises(InvalidArgument, match="coordinate is_dead is missing"):
        analysis.pca(token_run.drop_vars("is_dead"), "dead")


def test_quantities_refuse_other_objects_than_datasets(token_run):
    for given in ("run.zarr", None, token_run.W):
        for quantity in (analysis.freeze, analysis.summary, analysis.with_populations):
            with pytest.raises(InvalidArgument, match="Dataset"):
                quantity(given)
    with pytest.raises(InvalidArgument, match="got ranks='a', expected a whole number"):
        token_run.traj.clusters("dead", ranks="a")
    with pytest.raises(InvalidArgument, match="expected names of quantities"):
        analysis.compute(token_run, 3)

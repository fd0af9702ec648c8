"""Every quantity raises one sentence for options of a wrong type."""

from __future__ import annotations

import pytest

from trajstore import analysis
from trajstore.analysis.registry import ALONE, QUANTITIES, answer
from trajstore.errors import InvalidArgument, TrajstoreError


@pytest.fixture
def run(make_run, walk):
    return make_run(walk(5, 4, 3), is_dead=[True, False, False, True])


OPTIONS = [
    (name, option) for name, quantity in (QUANTITIES | ALONE).items() for option in quantity.options
]


WRONG_VALUES = [
    ("adjacency", "k", 0),
    ("autocorrelation", "of", "speed"),
    ("clusters", "ranks", 0),
    ("crossings", "of", "share"),
    ("discontinuities", "threshold", 0),
    ("discontinuities", "window", 1),
    ("explain_gradient", "denominator", 0),
    ("explain_gradient", "precision", "int8"),
    ("explain_gradient", "targets", "none"),
    ("freeze", "min_unchanged", 0),
    ("freeze", "per", "row"),
    ("freeze_attribution", "window", 0),
    ("heatmap", "most_groups", 0),
    ("heatmap", "of", "speed"),
    ("lattice_displacement", "metric", "miles"),
    ("pca", "first", "grad"),
    ("radial_tangential", "about", "sun"),
    ("separation", "of", "speed"),
    ("sky", "axis", "sun"),
    ("sky", "of", "delta"),
]


@pytest.mark.parametrize(
    ("name", "option", "value"), [*((*option, object()) for option in OPTIONS), *WRONG_VALUES]
)
def test_quantities_refuse_an_option_of_a_wrong_type_or_value(name, option, value, run):
    required = (QUANTITIES | ALONE)[name].required if name != "heatmap" else ()
    with pytest.raises(TrajstoreError) as reported:
        getattr(analysis, name)(run, **{**dict.fromkeys(required, 1), option: value})
    assert isinstance(reported.value, InvalidArgument), reported.value
    assert option in str(reported.value)
    if (name, option, value) in WRONG_VALUES:
        assert f"got {option}={value!r}, expected" in str(reported.value)


def test_from_the_accessor_and_as_text(run):
    with pytest.raises(InvalidArgument, match="got ranks='a', expected a whole number"):
        run.traj.clusters("dead", ranks="a")
    with pytest.raises(InvalidArgument, match="optimizer='adam', expected a mapping of strings"):
        answer(run, ["adam_update"], ["optimizer=adam"])
    with pytest.raises(InvalidArgument, match=r"got population=\('dead', 'live'\), expected a"):
        answer(run, ["clusters"], ["population=dead,live"])
    with pytest.raises(InvalidArgument, match=r"got k=1.5, expected a whole number"):
        run.traj.adjacency(k=1.5)


@pytest.mark.parametrize("source", ["run.zarr", None, "W"])
def test_quantities_refuse_other_objects_than_datasets(source, run):
    given = run.W if source == "W" else source
    for quantity in (analysis.freeze, analysis.summary, analysis.with_populations):
        with pytest.raises(InvalidArgument, match="Dataset"):
            quantity(given)


@pytest.mark.parametrize("name", analysis.QUANTITIES)
def test_quantities_refuse_a_dataset_without_tokens(name, run):
    with pytest.raises(InvalidArgument, match="got a Dataset without tokens"):
        getattr(run.isel(token=slice(0)).traj, name)()


@pytest.mark.parametrize("names", [3, [3], [["freeze"]]])
def test_names_are_texts(names, run):
    with pytest.raises(InvalidArgument, match="expected names of quantities"):
        analysis.compute(run, names)

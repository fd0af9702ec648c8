"""Heatmaps, compared with a model that pools with loops."""

from __future__ import annotations

import numpy as np
import pytest

from trajstore import analysis
from trajstore.errors import InvalidArgument


def model(values, last, rows, columns, pool):
    ordered = values[:, np.argsort(last, kind="stable")]
    return [
        [pool(block) for block in np.split(band, columns, axis=1)]
        for band in np.split(ordered, rows, axis=0)
    ]


def test_groups_of_the_heatmap(make_run, walk):
    ds = make_run(walk(23, 11, 6), is_dead=np.arange(11) % 3 == 0, chunks=(6, 4, 3))
    last = analysis.freeze(ds).last_motion.values
    rows, columns = [5, 11, 16], [3, 7]
    regime = analysis.regimes(ds).regime.values

    def commonest(block):
        counts = np.bincount(block.ravel(), minlength=5)
        return np.flatnonzero(counts == counts.max()).max()

    found = analysis.heatmap(ds, most_steps=4, most_groups=3).compute()
    np.testing.assert_array_equal(found.update_size, model(regime, last, rows, columns, commonest))
    assert found.update_size.dtype == np.int8
    assert found.step.values.tolist() == [1, 6, 12, 17]
    assert found.steps.values.tolist() == [5, 6, 5, 6]
    assert found.tokens.values.tolist() == [3, 4, 4]
    np.testing.assert_array_equal(found.last_motion, np.sort(last)[[2, 6, 10]])
    dead = model(ds.is_dead.values[None], last, [], columns, np.mean)
    np.testing.assert_array_equal(found.dead_fraction, dead[0])
    assert "dead_fraction" not in analysis.heatmap(ds.drop_vars("is_dead"))
    hop = analysis.lattice_displacement(ds, ord=1).values
    found = analysis.heatmap(ds, "hop", most_steps=4, most_groups=3)
    np.testing.assert_allclose(
        found.update_size, model(hop, last, rows, columns, np.mean), rtol=1e-6
    )


def test_a_small_heatmap_is_not_pooled(make_run, walk):
    ds = make_run(walk(9, 5, 4))
    found = analysis.heatmap(ds)
    order = np.argsort(analysis.freeze(ds).last_motion.values, kind="stable")
    np.testing.assert_array_equal(found.update_size, analysis.regimes(ds).regime.values[:, order])


def test_a_heatmap_needs_two_rows(make_run, walk):
    with pytest.raises(InvalidArgument, match="at least 2 rows"):
        analysis.heatmap(make_run(walk(1, 5, 4)))

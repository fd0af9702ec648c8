from __future__ import annotations

import numpy as np
import pytest

from trajstore import analysis


def motion_of(bits: np.ndarray) -> np.ndarray:
    """True where any bit changed, with −0 equal to +0."""
    point = np.where(bits & 0x7FFF, bits, 0)
    return (point[1:] != point[:-1]).any(-1)


def life_of(moved: np.ndarray, steps: np.ndarray, min_unchanged: int) -> tuple[int, int, int, int]:
    """Facts about one token, from a loop over its rows."""
    last, thaws, moves = None, 0, 0
    for row in range(1, len(steps)):
        if moved[row - 1]:
            if last is not None and steps[row - 1] - steps[last] >= min_unchanged:
                thaws += 1
            last, moves = row, moves + 1
    last_motion = steps[last] if last is not None else -1
    still = steps[-1] - steps[last if last is not None else 0]
    following = steps[0] if last is None else steps[min(last + 1, len(steps) - 1)]
    return last_motion, following if still >= min_unchanged else -1, thaws, moves


@pytest.mark.parametrize("min_unchanged", [1, 3])
@pytest.mark.parametrize("spread", [1, 2], ids=["every step", "growing gaps"])
def test_freeze(bits, chunks, min_unchanged, spread, make_run):
    steps = np.arange(len(bits)) ** spread
    dead = np.arange(bits.shape[1]) % 2 == 0
    ds = make_run(bits, steps=steps, is_dead=dead, chunks=chunks)
    got = analysis.freeze(ds, min_unchanged=min_unchanged).compute()
    moved = motion_of(bits)
    lives = [life_of(moved[:, token], steps, min_unchanged) for token in range(bits.shape[1])]
    for name, expected in zip(
        ("last_motion", "frozen_since", "thaws", "moves"),
        np.array(lives).T,
        strict=True,
    ):
        assert got[name].dtype == np.int64
        np.testing.assert_array_equal(got[name], expected, err_msg=name)
    since = np.array(lives)[:, 1]
    frozen = (since >= 0) & (since <= steps[1:, None])
    for population, members in {"dead": dead, "live": ~dead, "all": dead | True}.items():
        if members.any():
            still = got.unchanged_fraction.sel(population=population)
            np.testing.assert_allclose(still, 1 - moved[:, members].mean(1))
            share = got.frozen_fraction.sel(population=population)
            np.testing.assert_allclose(share, frozen[:, members].mean(1))
        else:
            assert got.unchanged_fraction.sel(population=population).isnull().all()


def test_all_dead_none_dead_and_unlabeled(make_run, walk):
    bits = walk(9, 4, 4)
    everyone = analysis.freeze(make_run(bits)).compute()
    assert everyone.population.values.tolist() == ["all"]
    for dead in (np.ones(4, bool), np.zeros(4, bool)):
        got = analysis.freeze(make_run(bits, is_dead=dead)).compute()
        full, empty = ("dead", "live") if dead[0] else ("live", "dead")
        np.testing.assert_array_equal(
            got.unchanged_fraction.sel(population=full), everyone.unchanged_fraction[:, 0]
        )
        assert got.unchanged_fraction.sel(population=empty).isnull().all()
        assert got.frozen_fraction.sel(population=empty).isnull().all()


def test_a_stored_summary_answers_without_the_weights(bits, make_run):
    ds = make_run(bits)
    hops = analysis.lattice_displacement(ds, ord=1)
    stored = ds.assign(W_ulp_l1=hops.reindex(step=ds.step)).drop_vars("W")
    got, expected = analysis.freeze(stored).compute(), analysis.freeze(ds).compute()
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name])


def test_freeze_of_each_element(bits, chunks, make_run):
    steps = np.arange(len(bits)) * 3 + 5
    dead = np.arange(bits.shape[1]) % 3 == 0
    ds = make_run(bits, steps=steps, is_dead=dead, chunks=chunks)
    moved = (bits[1:] != bits[:-1]) & (((bits[1:] | bits[:-1]) & 0x7FFF) != 0)
    numbers = np.arange(1, len(bits))[:, None, None]
    last = np.where(moved, numbers, -1).max(0, initial=-1)
    got = analysis.freeze(ds, min_unchanged=7, per="element").compute()
    motion = np.where(last < 0, -1, steps[last])
    np.testing.assert_array_equal(got.last_motion, motion)
    unchanged = steps[-1] - steps[np.maximum(last, 0)]
    since = np.where(unchanged >= 7, steps[np.minimum(last + 1, len(bits) - 1)], -1)
    np.testing.assert_array_equal(got.frozen_since, since)
    middle = np.sort(motion, axis=-1)[:, (motion.shape[1] - 1) // 2]
    np.testing.assert_array_equal(got.median_last_motion, middle)
    whole = analysis.freeze(ds, min_unchanged=7).compute()
    np.testing.assert_array_equal(got.last_motion.max("hidden"), whole.last_motion)
    dead_now = got.sel(population="dead")
    np.testing.assert_allclose(dead_now.unchanged_fraction, 1 - moved[:, dead].mean((1, 2)))
    frozen = [((since >= 0) & (since <= step))[dead].mean() for step in steps[1:]]
    np.testing.assert_allclose(dead_now.frozen_fraction, frozen)

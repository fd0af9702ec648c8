from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from trajstore import analysis
from trajstore.errors import InvalidArgument


@pytest.fixture
def populated(bits, chunks, make_run):
    dead = np.arange(bits.shape[1]) % 3 != 1
    steps = np.cumsum(1 + np.arange(len(bits)) % 3)
    ds = make_run(bits, steps=steps, is_dead=dead, chunks=chunks)
    return ds, {"dead": dead, "live": ~dead, "all": dead | True}


def test_centroid(populated):
    ds, populations = populated
    got = analysis.centroid(ds).compute()
    W = ds.W.values.astype(np.float64)
    for name, members in populations.items():
        one = got.sel(population=name)
        if not members.any():
            assert all(one[fact].isnull().all() for fact in one)
            continue
        with np.errstate(all="ignore"):
            centre = W[:, members].mean(1)
            radii = np.linalg.norm(W[:, members] - centre[:, None], axis=-1)
            drift = np.linalg.norm(np.diff(centre, axis=0), axis=-1) / np.diff(ds.step.values)
            expected = {
                "centroid": centre,
                "centroid_norm": np.linalg.norm(centre, axis=-1),
                "mean_radius": radii.mean(1),
                "max_radius": radii.max(1),
                "drift": np.append(np.nan, drift),
            }
        for fact, values in expected.items():
            np.testing.assert_allclose(one[fact], values, rtol=1e-9, atol=1e-300, err_msg=fact)


def test_bulk_and_thermal(populated):
    ds, populations = populated
    got = analysis.bulk_thermal(ds).compute()
    with np.errstate(all="ignore"):
        velocity = np.diff(ds.W.values.astype(np.float64), axis=0)
        velocity /= np.diff(ds.step.values)[:, None, None]
    for name, members in populations.items():
        if not members.any():
            assert got.bulk_speed.sel(population=name).isnull().all()
            continue
        one = got.sel(population=name)
        with np.errstate(all="ignore"):
            bulk = velocity[:, members].mean(1)
            about = velocity[:, members] - bulk[:, None]
            thermal = np.sqrt((about**2).sum(-1).mean(1))
            speed = np.linalg.norm(bulk, axis=-1)
            ratio = speed / thermal
            square = (velocity[:, members] ** 2).sum(-1).mean(1)
        np.testing.assert_allclose(one.bulk_velocity, bulk, rtol=1e-9)
        np.testing.assert_allclose(one.bulk_speed, speed, rtol=1e-9)
        np.testing.assert_allclose(one.thermal_speed, thermal, rtol=1e-9, atol=1e-300)
        np.testing.assert_allclose(one.bulk_thermal_ratio, ratio, rtol=1e-6)
        finite = np.isfinite(square)
        np.testing.assert_allclose(
            (one.bulk_speed**2 + one.thermal_speed**2).values[finite], square[finite], rtol=1e-9
        )


def test_coherence(populated):
    ds, populations = populated
    got = analysis.coherence(ds).compute()
    with np.errstate(all="ignore"):
        ways = np.diff(ds.W.values.astype(np.float64), axis=0)
    for name, members in populations.items():
        for row, way in enumerate(ways[:, members]):
            with np.errstate(all="ignore"):
                mean = way.mean(0) if members.any() else np.zeros(way.shape[1])
                moving = way[np.linalg.norm(way, axis=-1) != 0]
                cosines = [
                    token @ mean / np.linalg.norm(token) / np.linalg.norm(mean) for token in moving
                ]
            expected = np.mean(cosines) if cosines and np.linalg.norm(mean) else np.nan
            np.testing.assert_allclose(got.sel(population=name)[row], expected, rtol=1e-9)


def test_distinct(populated):
    ds, populations = populated
    got = analysis.distinct(ds).compute()
    W = ds.W.values
    for name, members in populations.items():
        for row in range(len(W)):
            counts = Counter(token.tobytes() for token in W[row, members])
            one = got.sel(population=name).isel(step=row)
            assert one.distinct == len(counts)
            assert one.most_common == max(counts.values(), default=0)


def test_one_population(make_run, walk):
    ds = make_run(walk(6, 5, 4), is_dead=np.arange(5) < 2)
    whole = analysis.centroid(ds).compute()
    dead = analysis.centroid(ds, "dead").compute()
    assert "population" not in dead.dims
    np.testing.assert_array_equal(dead.centroid_norm, whole.centroid_norm.sel(population="dead"))
    with pytest.raises(InvalidArgument, match="'undead'"):
        analysis.centroid(ds, "undead")
    with pytest.raises(InvalidArgument, match="is_dead"):
        analysis.coherence(ds.drop_vars("is_dead"), "dead")
    assert analysis.coherence(ds.drop_vars("is_dead"), "all").sizes["step"] == 5


@pytest.mark.parametrize("of", ["centroid", "displacement"])
def test_against_pairs_of_centroids(of, make_run, walk):
    dead = np.arange(7) % 3 == 0
    ds = make_run(walk(9, 7, 5), is_dead=dead, chunks=(4, 3, -1))
    W = ds.W.values.astype(np.float64)
    means = {"dead": W[:, dead].mean(1), "live": W[:, ~dead].mean(1), "all": W.mean(1)}
    if of == "displacement":
        means = {name: mean - mean[0] for name, mean in means.items()}
    got = analysis.separation(ds, of).compute()
    for one, x in means.items():
        for other, y in means.items():
            pair = got.sel(population=one, other_population=other)
            np.testing.assert_allclose(pair.separation, np.linalg.norm(x - y, axis=-1), atol=1e-15)
            with np.errstate(invalid="ignore"):
                lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
                cosine = np.clip((x * y).sum(-1) / lengths, -1, 1)
                direction = x / np.linalg.norm(x, axis=-1)[:, None]
            np.testing.assert_allclose(
                pair.separation_angle, np.degrees(np.arccos(cosine)), atol=1e-5
            )
            np.testing.assert_allclose(pair.direction, direction, atol=1e-12)

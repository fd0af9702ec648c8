from __future__ import annotations

import numpy as np
import pytest

from trajstore import analysis


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

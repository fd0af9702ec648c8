from __future__ import annotations

import numpy as np
import pytest

from trajstore import analysis
from trajstore.errors import InvalidArgument, VariableNotRecorded


@pytest.mark.parametrize("chunks", [None, (3, 2, 2)], ids=str)
def test_mean_logits_equal_the_product_of_W_and_the_mean_state(chunks, make_run, walk):
    bits = walk(8, 5, 4)
    bits[:, 3] = bits[:, 1]
    mean = np.random.default_rng(3).normal(size=(8, 4)).astype("f4")
    mean[0] = np.nan
    ds = make_run(bits, steps=np.array([0, 1, 2, 3, 5, 6, 7, 8]), chunks=chunks)
    with pytest.raises(VariableNotRecorded, match="hidden_mean"):
        analysis.mean_logits(ds)
    ds = ds.assign(hidden_mean=(("step", "hidden"), mean))
    got = analysis.mean_logits(ds, k=3).compute()
    expected = np.einsum("sth,sh->st", ds.W.values[:-1].astype(float), mean[1:].astype(float))
    expected[3] = np.nan  # step 4 is missing
    np.testing.assert_allclose(got.mean_logit[1:], expected)
    for row, logits in enumerate(expected, 1):
        if row == 4:
            assert (got.top_token[row] == -1).all()
            assert got.top_logit[row].isnull().all()
            continue
        order = sorted(range(5), key=lambda token: (-logits[token], token))[:3]
        assert got.top_token[row].values.tolist() == ds.token.values[order].tolist()
        np.testing.assert_allclose(got.top_logit[row], logits[order])
    assert (got.top_token[0] == -1).all()
    with pytest.raises(InvalidArgument, match="k=6, expected 1 to 5"):
        analysis.mean_logits(ds, 6)

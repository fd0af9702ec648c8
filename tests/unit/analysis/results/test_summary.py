""""""

from __future__ import annotations

from trajstore import analysis
from trajstore.analysis.results.summary import summary_table


def test_a_line_for_each_run(make_run, walk):
    bits = walk(5, 4, 3)
    one = make_run(bits, grad=bits.copy(), is_dead=[True, False, False, True], chunks=(2, 3, 2))
    other = one.assign(loss=("step", [4.0, 3, 2, 1, 0.5])).drop_vars("grad")
    found = {name: analysis.summary(ds).compute() for name, ds in {"a": one, "b": other}.items()}
    _, columns, rows = summary_table(found)
    assert columns == [
        "run", "last step", "first loss", "last loss",
        "|grad| dead", "|grad| live", "displacement dead", "displacement live",
    ]  # fmt: skip
    moved = [
        f"{found['a'].displacement.sel(population=name, statistic='mean').item():.4e}"
        for name in ("dead", "live")
    ]
    grad = [
        f"{found['a'].grad_norms.sel(population=name, statistic='mean', when='last').item():.4e}"
        for name in ("dead", "live")
    ]
    assert rows == [
        ["a", "4", "", "", *grad, *moved],
        ["b", "4", "3.0000", "0.5000", "", "", *moved],
    ]

"""The command `compare`."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import click

from trajstore.cli.options import JSON, RUN
from trajstore.cli.output import counted, out, print_json, print_table
from trajstore.errors import InvalidArgument

if TYPE_CHECKING:
    import xarray as xr


_SETTINGS = 12  # maximum differing settings to print


class _Percentage(click.ParamType[float]):
    """A percentage, as a fraction."""

    name = "percent"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Parse a text such as 1%."""
        percentage = re.fullmatch(r"(\d+\.?\d*|\.\d+)%", str(value))
        if percentage is None:
            self.fail(f"got {value!r}, expected a percentage such as 1%")
        return float(percentage[1]) / 100


@click.command()
@RUN
@click.argument("other", type=click.Path(), required=False)
@click.option(
    "--over",
    type=_Percentage(),
    metavar="PERCENT",
    help="Print from which step on the losses differ by more than this, such as 1%.",
)
@JSON
def compare(run: str, other: str | None, over: float | None, as_json: bool) -> None:
    """Print the first step at which two runs differ in any bit, where, and how far they diverge.

    Runs with the same content digest hold the same rows and are not read. Exits with 0 even if the
    runs differ; scripts can read the result from --json. Without a second run, compares the two
    matrices that a training with untied weights recorded under one name.

    \b
    Example:
      trajstore compare straight.zarr resumed.zarr
      trajstore compare gatsby.zarr slower.zarr --over 1%
      trajstore compare untied.zarr
    """
    import xarray as xr

    from trajstore import analysis
    from trajstore.store.metadata.metadata_form import CONTENT
    from trajstore.store.reading.open_run import open_run
    from trajstore.store.reading.open_runs import run_paths

    paths = run_paths([run]) if other is None else [run, other]
    if len(paths) != 2:
        raise InvalidArgument(f"got {', '.join(paths)}, expected two runs; name both")
    first, second = map(open_run, paths)
    tokens = {"first": first.sizes["token"], "second": second.sizes["token"]}
    first, second = _of_common_tokens(first, second)
    found = analysis.compare(first, second, over)
    digest = first.attrs.get(CONTENT)
    same_content = digest is not None and digest == second.attrs.get(CONTENT)
    if same_content:  # equal, without reading
        found = xr.zeros_like(found)
        for name in {"first_difference", "first_over"} & set(found):
            found[name] = found[name] - 1
    found = found.compute()
    facts = {
        "same_content": same_content,
        "steps": {"common": found.sizes["step"], "first": first.sizes["step"],
                  "second": second.sizes["step"]},
        "tokens": {"common": first.sizes["token"], **tokens},
        "differing_settings": found.attrs["differing_settings"],
        "only_first": [str(name) for name in first.data_vars if name not in second.data_vars],
        "only_second": [str(name) for name in second.data_vars if name not in first.data_vars],
        "variables": {
            str(name): {
                "first_difference": int(found.first_difference[at]),
                "differing_steps": int(found.differs[:, at].sum()),
                "distance": found.distance[:, at].values.tolist(),
            }
            for at, name in enumerate(found["variable"].values)
        },
        "step": found.step.values.tolist(),
    }  # fmt: skip
    if over is not None:
        differences = found.loss_difference.values
        facts["loss"] = {
            "over": over,
            "first_over": int(found.first_over),
            "steps_over": int((differences > over).sum()),
            "difference": differences.tolist(),
        }
    if as_json:
        print_json(facts)
    else:
        print_comparison(facts)


def _of_common_tokens(first: xr.Dataset, second: xr.Dataset) -> tuple[xr.Dataset, xr.Dataset]:
    """Restrict two runs to their common tokens.

    Raises
    ------
    InvalidArgument
        If they have no common token.
    """
    import numpy as np

    ids, one, other = np.intersect1d(
        first["token"].values, second["token"].values, return_indices=True
    )
    if np.array_equal(first["token"].values, second["token"].values):
        return first, second
    if not ids.size:
        raise InvalidArgument("the runs have no common token; compare runs with common token ids")
    return first.isel(token=one), second.isel(token=other)


def _print_loss(loss: dict[str, Any], steps: list[int]) -> None:
    at, over = loss["first_over"], f"{loss['over']:.6%}".rstrip("%").rstrip("0").rstrip(".")
    known = [(value, step) for value, step in zip(loss["difference"], steps, strict=True)
             if math.isfinite(value)]  # fmt: skip
    most = f"{max(known)[0]:.3%} at step {max(known)[1]:,}" if known else "unknown"
    if at < 0:
        out.print(f"The losses never differ by more than {over}%; the largest difference: {most}.")
        return
    since = sum(step >= at for step in steps)
    out.print(
        f"The losses differ by more than {over}% from step {at:,} on, at {loss['steps_over']:,} of "
        f"{counted(since, 'step')}; the largest difference: {most}."
    )


def print_comparison(facts: dict[str, Any]) -> None:
    """Print the result of `analysis.compare`."""
    common, first, second = (facts["steps"][key] for key in ("common", "first", "second"))
    differing = [name for name, fact in facts["variables"].items() if fact["differing_steps"]]
    verdict = f"differ in {', '.join(differing)}" if differing else "are identical, bit for bit"
    unread = " according to their content digests; no row was read (`trajstore verify` reads all)"
    out.print(
        f"Over {counted(common, 'common step')} and "
        f"{counted(len(facts['variables']), 'common variable')}, the runs {verdict}"
        f"{unread if facts['same_content'] else ''}."
    )
    tokens = facts["tokens"]
    if not tokens["common"] == tokens["first"] == tokens["second"]:
        out.print(
            f"The first run has {tokens['first']:,} tokens, the second {tokens['second']:,}; only "
            f"the {tokens['common']:,} common tokens are compared."
        )
    if not common == first == second:
        out.print(f"The first run has {counted(first, 'row')}, the second {second:,}.")
    for which in ("first", "second"):
        if facts[f"only_{which}"]:
            out.print(f"Only the {which} run has {', '.join(facts[f'only_{which}'])}.")
    if "loss" in facts:
        _print_loss(facts["loss"], facts["step"])
    if facts["differing_settings"]:
        named, more = facts["differing_settings"][:_SETTINGS], ""
        if len(facts["differing_settings"]) > _SETTINGS:
            more = f" and {len(facts['differing_settings']) - _SETTINGS} others (--json)"
        out.print(f"Their settings differ in {', '.join(named)}{more}.")
    if not differing:
        return
    rows = []
    for name in differing:
        fact = facts["variables"][name]
        distance = fact["distance"]
        at = facts["step"].index(fact["first_difference"])
        finite = [value for value in distance if math.isfinite(value)]
        shown = (distance[at], max(finite, default=math.nan), distance[-1])
        steps = (fact["first_difference"], fact["differing_steps"])
        rows.append((name, *steps, *(f"{value:.6g}" for value in shown)))
    columns = ("first differing step", "differing steps", "distance at first", "largest", "at last")
    print_table("", ("variable", *columns), rows)

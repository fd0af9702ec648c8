"""Draw the figures of README, the tutorial and the gallery, from the runs of these commands.

trajstore record --preset gatsby --steps 300 -o gatsby.zarr
trajstore record --preset gatsby --steps 1000 -o thousand.zarr
trajstore record --preset gatsby --steps 300 --variables matrix,norms -o model.zarr
trajstore record --preset gatsby --steps 150 --seed 1 -o short.zarr
trajstore fork short.zarr --at 60 --set optimizer.lr=1e-4 -o slower.zarr
for seed in 1 2 3; do for sigma in 1e-5 1e-2; do
    trajstore record --preset gatsby --seed $seed --set initialization.sigma=$sigma --steps 60 \\
        -o runs/sigma=${sigma}_seed=$seed.zarr
done; done
python tools/documentation_figures.py FOLDER docs/figures

FOLDER holds the runs. The command before a figure on its page draws it, in light and dark. A
palette of colors makes each file three times smaller. Figures with many shades keep all their
colors.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import unittest.mock
from pathlib import Path

import matplotlib
from PIL import Image

from trajstore.analysis.figures.sheet import save
from trajstore.cli.main import main

DOCS = Path(__file__).parents[1] / "docs"
OPENING = {"readme-heatmap.png": "trajstore plot gatsby.zarr heatmap"}
FILMS = ("film.gif", "film.png")
SEVERAL = {"gallery-several.png": "trajstore plot runs/ grad_norms --select population=dead"}
COLORS = 64
STYLES = ("light", "dark")
MAPS = (
    "heatmap",
    "speed_density",
    "moments",
    "param_update_lost",
    "layers",
    "moment_tracks",
    "trajectory",
    "bulk_thermal",
)


def figures(page: str) -> dict[str, str]:
    """Command before each figure of a page, by the name of its file."""
    found, command = {}, ""
    for line in (DOCS / page).read_text().splitlines():
        if line.startswith("trajstore plot "):
            command = line
        if image := re.match(r"!\[.*\]\(\.\./figures/(.+)\)", line):
            found[image[1]] = command
    return found


def draw(command: str, file: Path, dpi: int) -> None:
    """Draw the figure of a command, light and dark, with a palette unless it is a map."""
    for style in STYLES:
        target = variant(file, style)
        with unittest.mock.patch.dict(save.__kwdefaults__, dpi=dpi):
            plot(shlex.split(command)[2:], target, style)
        with Image.open(target) as image:
            whole = image.convert("RGB")
        if not any(name in file.name for name in MAPS):
            whole = whole.quantize(COLORS, dither=Image.Dither.NONE)
        whole.save(target, optimize=True)


def variant(file: Path, style: str) -> Path:
    """File of a style; the site shows NAME-dark.png on dark pages."""
    return file if style == "light" else file.with_stem(f"{file.stem}-{style}")


def plot(words: list[str], target: Path, style: str) -> None:
    """Run `trajstore plot`."""
    options = ["--style", style, "-o", str(target), "--overwrite"]
    main(["plot", *words, *options], standalone_mode=False)


if __name__ == "__main__":
    matplotlib.use("agg")
    runs, target = sys.argv[1], Path(sys.argv[2]).resolve()
    os.chdir(runs)
    for drawn, dpi in (
        (OPENING, 150),
        (figures("start/tutorial.md"), 120),
        (figures("reference/figures.md"), 100),
        (SEVERAL, 100),
    ):
        for file, command in drawn.items():
            if file not in FILMS:
                draw(command, target / file, dpi)
    for file in FILMS:
        for style in STYLES:
            plot(["thousand.zarr", "film"], variant(target / file, style), style)

"""Learning curves and schedules as SVG files, readable without colour.

Letters are drawn as paths and nothing is loaded from elsewhere: each file stands by itself. Equal
lines make equal files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from arms import ABLATIONS, MAIN, RANGES
from lines import Line

mpl.use("svg")

from matplotlib import pyplot as plt

#: Curves are told apart by dashes and markers, and named at their ends.
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))
MARKERS = "os^vDPX*"
COLOURS = ("black", "tab:blue", "tab:red", "tab:green", "tab:purple", "tab:brown", "tab:orange")
CURVES = {arm.name for arm in MAIN}
SHOWN = {arm.name for arm in (*MAIN, *ABLATIONS)}

Lines = Mapping[str, Sequence[Line]]


def draw(task: str, by_arm: Lines, folder: Path) -> dict[str, str]:
    """Draw a task.

    Args:
        task: Its name, part of the files' names.
        by_arm: Finished runs.
        folder: Where to.

    Returns:
        Title -> file name, of the pictures that there was something for.
    """
    mpl.rcParams["svg.hashsalt"] = task
    mpl.rcParams["svg.fonttype"] = "path"
    ok = {
        arm: [line for line in mine if line["state"] == "ok"]
        for arm, mine in by_arm.items()
        if arm in SHOWN
    }
    ok = {arm: mine for arm, mine in ok.items() if mine}
    made = {
        f"Best fitness per round, {task}": (f"curves-{task}.svg", _curves(ok)),
        f"Learning rate of the winner's line, {task}": (f"schedules-{task}.svg", _schedules(ok)),
    }
    drawn: dict[str, str] = {}
    for title, (file, figure) in made.items():
        if figure is None:
            continue
        figure.suptitle(title)
        figure.savefig(folder / file, format="svg", metadata={"Date": None}, bbox_inches="tight")
        plt.close(figure)
        drawn[title] = file
    return drawn


def mean_curve(lines: Sequence[Line]) -> list[float]:
    """Return the mean over seeds of the best fitness of each round."""
    rounds = min(len(line["curve"]) for line in lines)
    return [float(np.mean([line["curve"][r] for line in lines])) for r in range(rounds)]


def _curves(by_arm: Lines) -> Any:  # noqa: ANN401 -- a figure
    means = {arm: mean_curve(lines) for arm, lines in by_arm.items() if arm in CURVES}
    longest = max((len(curve) for curve in means.values()), default=0)
    if longest < 2:
        return None
    figure, axis = plt.subplots(figsize=(9, 6))
    ends: list[tuple[float, str]] = []
    for place, (arm, curve) in enumerate(means.items()):
        style = {
            "marker": MARKERS[place % len(MARKERS)],
            "color": COLOURS[place % len(COLOURS)],
            "markerfacecolor": "white",
            "linewidth": 2.5 if arm == "new" else 1.2,
        }
        if len(curve) > 1:
            rounds = range(1, len(curve) + 1)
            axis.plot(rounds, curve, linestyle=DASHES[place % len(DASHES)], **style)
        else:  # evaluated at the end alone
            axis.plot([longest], curve, linestyle="none", **style)
        ends.append((curve[-1], arm))
    low, high = axis.get_ylim()
    for height, (value, arm) in _spread(ends, (high - low) / 28):
        axis.annotate(
            f"{arm}  {value:.2f}", (longest, value), (longest * 1.05, height), va="center",
            fontsize=8, annotation_clip=False, arrowprops={"arrowstyle": "-", "lw": 0.4},
        )  # fmt: skip
    axis.set_xlabel("round; a single marker is an arm that is evaluated at the end alone")
    axis.set_ylabel("best validation fitness, mean over seeds")
    axis.set_xticks(range(1, longest + 1))
    axis.grid(alpha=0.3)
    return figure


def _spread(ends: list[tuple[float, str]], gap: float) -> list[tuple[float, tuple[float, str]]]:
    """Return heights at which names do not cover each other, lowest first.

    Names that would, are pushed up and, by half as much, down again together.
    """
    placed: list[tuple[float, tuple[float, str]]] = []
    for end in sorted(ends):
        height = end[0] if not placed else max(end[0], placed[-1][0] + gap)
        placed.append((height, end))
    pushed = max((height - end[0] for height, end in placed), default=0.0)
    return [(height - pushed / 2, end) for height, end in placed]


def _schedules(by_arm: Lines) -> Any:  # noqa: ANN401 -- a figure
    moving = {
        arm: lines
        for arm, lines in by_arm.items()
        if any(len(line["schedule"]) > 1 for line in lines)
    }
    if not moving:
        return None
    columns = min(3, len(moving))
    rows = math.ceil(len(moving) / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(3.2 * columns, 2.4 * rows), sharex=True, sharey=True, squeeze=False
    )
    for axis in axes.flat[len(moving) :]:
        axis.set_visible(False)
    for axis, (arm, lines) in zip(axes.flat, moving.items(), strict=False):
        by_round: dict[int, list[float]] = {}
        for line in lines:
            steps = [(step["round"] + 1, step["lr"]) for step in line["schedule"]]
            axis.plot(*zip(*steps, strict=True), color="0.65", linewidth=0.7)
            for number, lr in steps:
                by_round.setdefault(number, []).append(lr)
        middle = [(number, float(np.median(by_round[number]))) for number in sorted(by_round)]
        axis.plot(*zip(*middle, strict=True), color="black", linewidth=2, marker="o", markersize=3)
        axis.set_title(arm, fontsize=9)
        axis.set_yscale("log")
        axis.set_ylim(RANGES["lr"]["min"] / 1.5, RANGES["lr"]["max"] * 1.5)
        axis.tick_params(labelbottom=True, labelleft=True)
        axis.grid(alpha=0.3)
    figure.supxlabel("round; thin: one seed, thick: the median", fontsize=9)
    figure.supylabel("lr of the line that won", fontsize=9)
    figure.tight_layout()
    return figure

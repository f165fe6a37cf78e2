"""Pictures of rows: bandwidth by bytes moved under the card's own curve, and how far large calls are from the limit.

Needs matplotlib, which is no dependency of the package.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import NotBuiltError

__all__ = ["check_can_plot", "draw_distances", "draw_rows"]

_COLORS = {
    "quant": "#1f77b4",
    "moe": "#ff7f0e",
    "mhc": "#2ca02c",
    "engram": "#d62728",
    "gemm": "#9467bd",
    "transpose": "#8c564b",
    "transform": "#e377c2",
    "rand": "#7f7f7f",
}
_SMALLEST_BYTES = 64e3  # below, a call is a launch whatever it moves
_NAMED_BYTES, _NUM_NAMED = 32e6, 6  # the farthest of the larger calls get their names into the picture
_BAR = 0.92  # of a copy: what a memory-bound call is held to


def check_can_plot() -> None:
    """Raises NotBuiltError, with what to type, where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise NotBuiltError("bench: --plot needs matplotlib, which is not installed: pip install matplotlib")


def draw_rows(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Above, GB/s of every call by the bytes it moves; below, its share of the limit. png, svg or pdf by the ending."""
    pyplot = _load_pyplot()
    timed = [row for row in rows if "us" in row and row["bytes"] >= _SMALLEST_BYTES] or [
        row for row in rows if "us" in row
    ]
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(11, 9), sharex=True, layout="constrained")
    copies = sorted({(row["bytes"], row["bytes"] / row["copy_us"] / 1e3) for row in timed})
    above.plot(*zip(*copies, strict=True), color="black", linewidth=1, label="a copy of as many bytes")
    for family, points in _by_family(timed).items():
        sizes = [row["bytes"] for row in points]
        style = {"s": 16, "color": _COLORS.get(family, "black"), "alpha": 0.75, "linewidths": 0}
        above.scatter(sizes, [row["gbs"] for row in points], label=family, **style)
        below.scatter(sizes, [100 * row["of_limit"] for row in points], **style)
    below.axhline(100, color="black", linewidth=1)
    below.axhline(100 * _BAR, color="black", linewidth=0.6, linestyle="--")
    _name_farthest(below, timed)
    above.set(xscale="log", ylabel="GB/s", title="Bandwidth: bytes that have to be moved, over the time")
    below.set(xlabel="bytes read and written", ylabel="% of the limit", ylim=(0, 120))
    for axes in (above, below):
        axes.grid(True, linewidth=0.3)
    above.legend(loc="upper left")
    _save(pyplot, figure, file)


def draw_distances(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """A bar for the farthest call of each operator, the farthest first."""
    pyplot = _load_pyplot()
    farthest: dict[str, Mapping[str, Any]] = {}
    for row in sorted((row for row in rows if "us" in row), key=lambda row: row["of_limit"]):
        farthest.setdefault(row["operator"], row)
    shown = list(farthest.values())
    figure, axes = pyplot.subplots(figsize=(11, 1 + 0.22 * len(shown)), layout="constrained")
    colors = [_COLORS.get(row["operator"].partition(".")[0], "black") for row in shown]
    places = range(len(shown))
    axes.barh(places, [100 * row["of_limit"] for row in shown], color=colors, height=0.7)
    axes.set_yticks(places, [row["operator"] for row in shown], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(100, color="black", linewidth=1)
    axes.axvline(100 * _BAR, color="black", linewidth=0.6, linestyle="--")
    axes.set(xlabel="% of the limit: the large call of each operator that is farthest from it", ylim=(len(shown), -1))
    axes.grid(True, axis="x", linewidth=0.3)
    _save(pyplot, figure, file)


def _load_pyplot() -> Any:
    check_can_plot()
    importlib.import_module("matplotlib").use("agg")
    return importlib.import_module("matplotlib.pyplot")


def _by_family(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["operator"].partition(".")[0], []).append(row)
    return found


def _name_farthest(axes: Any, timed: Sequence[Mapping[str, Any]]) -> None:
    farthest: dict[str, Mapping[str, Any]] = {}
    for row in sorted(timed, key=lambda row: row["of_limit"]):
        if row["bytes"] >= _NAMED_BYTES:
            farthest.setdefault(row["operator"], row)
    for row in list(farthest.values())[:_NUM_NAMED]:
        place = (row["bytes"], 100 * row["of_limit"])
        name = row["operator"].partition(".")[2]
        axes.annotate(name, place, xytext=(6, -3), textcoords="offset points", fontsize=7)


def _save(pyplot: Any, figure: Any, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=80, metadata={"Software": None} if file.suffix == ".png" else None)
    pyplot.close(figure)

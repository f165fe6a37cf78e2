"""A picture of rows: bandwidth by bytes moved, under the curve of the card's own copies. Needs matplotlib."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import NotBuiltError

__all__ = ["check_can_plot", "draw_rows"]

_WORST_NAMED = 8  # that get their names into the picture
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
_NAMED_BYTES = 32e6  # smaller calls lie far from the curve by nature: a launch is most of their time


def check_can_plot() -> None:
    """Raises NotBuiltError, with what to type, where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise NotBuiltError("bench: --plot needs matplotlib, which is not installed: pip install matplotlib")


def draw_rows(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write the picture; its format is the file's ending (png, svg, pdf)."""
    check_can_plot()
    importlib.import_module("matplotlib").use("agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    timed = sorted((row for row in rows if "us" in row), key=lambda row: row["bytes"])
    figure, axes = pyplot.subplots(figsize=(11, 6.5), layout="constrained")
    sizes, speeds = zip(*sorted({(row["bytes"], row["bytes"] / row["copy_us"] / 1e3) for row in timed}), strict=True)
    axes.plot(sizes, speeds, color="black", linewidth=1, label="a copy of as many bytes")
    for family in dict.fromkeys(row["operator"].partition(".")[0] for row in timed):
        points = [(row["bytes"], row["gbs"]) for row in timed if row["operator"].startswith(f"{family}.")]
        axes.scatter(*zip(*points, strict=True), s=14, color=_COLORS.get(family), label=family, alpha=0.8)
    _name_worst(axes, timed)
    axes.set(
        xscale="log", yscale="log", xlabel="bytes read and written", ylabel="GB/s", title="Bandwidth of every call"
    )
    axes.grid(True, which="both", linewidth=0.3)
    axes.legend(loc="lower right")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110, metadata={"Software": None} if file.suffix == ".png" else None)
    pyplot.close(figure)


def _name_worst(axes: Any, timed: Sequence[Mapping[str, Any]]) -> None:
    """The large calls that are farthest from the curve, one for each operator."""
    worst: dict[str, Mapping[str, Any]] = {}
    for row in sorted(timed, key=lambda row: row["of_limit"]):
        if row["bytes"] >= _NAMED_BYTES:
            worst.setdefault(row["operator"], row)
    for row in list(worst.values())[:_WORST_NAMED]:
        name = row["operator"].partition(".")[2]
        axes.annotate(
            f"{name} {row['of_limit']:.0%}",
            (row["bytes"], row["gbs"]),
            xytext=(6, -9),
            textcoords="offset points",
            fontsize=7,
        )

"""A bench report as a picture: speed-up by K, measured and predicted, and acceptance by position.

matplotlib is an extra and is imported only here, inside the functions.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import OptionError
from .results import ALL, Report, Row

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # told apart by colour-blind eyes too
_GREY = "#666666"


def check(path: str) -> None:
    """Raises OptionError if a plot could not be written, so that this is known before an hour of measuring."""
    if find_spec("matplotlib") is None:
        raise OptionError("--plot needs matplotlib: install it, or 'pilotfish[plot]'")
    if Path(path).suffix.lower() != ".png":
        raise OptionError(f"plot must name a .png file, not {path!r}")
    if not Path(path).expanduser().absolute().parent.is_dir():
        raise OptionError(f"plot: there is no folder {Path(path).expanduser().absolute().parent}")


def draw(report: Report, path: str) -> None:
    """Write the PNG. Rows of category ``all`` are drawn, one line per method."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)  # no window, no global state of pyplot
    left, right = figure.subplots(1, 2)
    series = _series(report.rows)
    for colour, (name, rows) in zip(_cycle(len(series)), series.items(), strict=True):
        _draw_speedup(left, name, rows, colour)
        _draw_acceptance(right, name, rows[-1], colour)
    _finish_speedup(left, sorted({row.num_speculative_tokens for rows in series.values() for row in rows}))
    _finish_acceptance(right)
    figure.suptitle(_title(report), fontsize=10, color=_GREY)
    figure.savefig(Path(path).expanduser(), dpi=150)


def _series(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """{label: its rows by K}."""
    drawn = [row for row in rows if row.category == ALL and row.method != "none"]
    drafters: dict[str, set[str]] = {}
    for row in drawn:
        drafters.setdefault(row.method, set()).add(row.drafter)
    series: dict[str, list[Row]] = {}
    for row in drawn:
        name = row.method if len(drafters[row.method]) == 1 else f"{row.method}: {row.drafter}"
        series.setdefault(name, []).append(row)
    return {name: sorted(own, key=lambda row: row.num_speculative_tokens) for name, own in series.items()}


def _draw_speedup(axes: Any, name: str, rows: Sequence[Row], colour: str) -> None:
    k = [row.num_speculative_tokens for row in rows]
    measured = [_number(row.speedup) for row in rows]
    axes.plot(k, measured, "o-", color=colour, label=name, linewidth=2, markersize=5, zorder=3)
    low = [_number(row.speedup_spread and row.speedup_spread[0]) for row in rows]
    high = [_number(row.speedup_spread and row.speedup_spread[1]) for row in rows]
    if len(rows) > 1:
        axes.fill_between(k, low, high, color=colour, alpha=0.12, linewidth=0)
    else:
        axes.vlines(k, low, high, color=colour, alpha=0.35, linewidth=4)
    axes.plot(k, [_number(row.predicted_speedup) for row in rows], "s--", color=colour, linewidth=1.2, markersize=4,
              markerfacecolor="white")  # fmt: skip
    axes.plot(k, [_number(row.predicted_speedup_measured_verify) for row in rows], "^:", color=colour, linewidth=1.2,
              markersize=4, markerfacecolor="white")  # fmt: skip


def _finish_speedup(axes: Any, values_of_k: Sequence[int]) -> None:
    from matplotlib.lines import Line2D

    axes.axhline(1, color=_GREY, linewidth=0.8, zorder=1)
    axes.set(title="Speed-up over plain decoding", xlabel="K, drafted tokens per step", xticks=values_of_k)
    axes.set_ylim(bottom=0)
    if len(values_of_k) == 1:
        axes.set_xlim(values_of_k[0] - 1, values_of_k[0] + 1)
    kinds = [
        Line2D([], [], color=_GREY, marker="o", linewidth=2, markersize=5, label="measured (band: 10-90 %)"),
        Line2D([], [], color=_GREY, marker="s", linestyle="--", markersize=4, markerfacecolor="white",
               linewidth=1.2, label="predicted, a longer pass costs nothing"),
        Line2D([], [], color=_GREY, marker="^", linestyle=":", markersize=4, markerfacecolor="white",
               linewidth=1.2, label="predicted, measured cost of a pass"),
    ]  # fmt: skip
    _tidy(axes)
    axes.legend(handles=kinds, frameon=False, fontsize=8, loc="best")


def _draw_acceptance(axes: Any, name: str, row: Row, colour: str) -> None:
    shares = row.acceptance_by_position
    label = f"{name} (K {row.num_speculative_tokens})"
    axes.plot(range(1, len(shares) + 1), shares, "o-", color=colour, label=label, linewidth=2, markersize=5)


def _finish_acceptance(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes.set(title="Acceptance by position, given all before it", xlabel="position in the draft", ylim=(0, 1.03))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    _tidy(axes)
    if axes.lines:
        axes.legend(frameon=False, fontsize=8, loc="lower left")


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.title.set_fontsize(11)


def _title(report: Report) -> str:
    environment, settings = report.environment, report.environment.get("settings", {})
    return (
        f"{environment.get('model')} ({environment.get('dtype')}) on {environment.get('cpu')}, "
        f"batch {settings.get('concurrency')}, temperature {settings.get('temperature')}"
    )


def _cycle(n: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(n)]


def _number(value: float | None) -> float:
    return float("nan") if value is None else value

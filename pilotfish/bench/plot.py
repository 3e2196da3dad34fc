"""A bench report as a picture: speed-up by K, measured and predicted, and acceptance by position.

matplotlib is an extra and is imported only here, inside the functions.
"""

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import OptionError
from .results import ALL, AUTO, NumDrafted, Report, Row

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # told apart by colour-blind eyes too
_GREY = "#666666"
_SHIFT = 0.09  # methods stand beside each other at the same K


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

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    FigureCanvasAgg(figure)  # no window, no global state of pyplot
    left, right = figure.subplots(1, 2)
    series = _series(report.rows)
    places = _places(row for rows in series.values() for row in rows)
    for i, (name, rows) in enumerate(series.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        shift = (i - (len(series) - 1) / 2) * _SHIFT
        fixed = [row for row in rows if row.num_speculative_tokens != AUTO]
        for joined in (fixed, rows[len(fixed) :]):  # auto is no further point of the same line
            _draw_speedup(left, joined, colour, places, shift)
        _draw_acceptance(right, name, (fixed or rows)[-1], colour)
    _finish_speedup(left, places)
    _finish_acceptance(right)
    if series:
        names, labels = right.get_legend_handles_labels()
        figure.legend(names, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    figure.suptitle(_title(report), fontsize=9.5, color=_GREY)
    figure.savefig(Path(path).expanduser(), dpi=150)


def _series(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """{label: its rows by K, auto last}."""
    drawn = [row for row in rows if row.category == ALL and row.method != "none"]
    drafters: dict[str, set[str]] = {}
    for row in drawn:
        drafters.setdefault(row.method, set()).add(row.drafter)
    series: dict[str, list[Row]] = {}
    for row in drawn:
        name = row.method if len(drafters[row.method]) == 1 else f"{row.method}: {row.drafter}"
        series.setdefault(name, []).append(row)
    return {name: sorted(own, key=_order) for name, own in series.items()}


def _order(row: Row) -> float:
    return float("inf") if row.num_speculative_tokens == AUTO else row.num_speculative_tokens


def _places(rows: Iterable[Row]) -> dict[NumDrafted, int]:
    """Where on the axis each K stands: side by side, for K = 2, 4, 8, 16 would crowd on a true scale."""
    values = {row.num_speculative_tokens: _order(row) for row in rows}
    return {k: place for place, k in enumerate(sorted(values, key=lambda k: values[k]))}


def _draw_speedup(axes: Any, rows: Sequence[Row], colour: str, places: Mapping[NumDrafted, int], shift: float) -> None:
    x = [places[row.num_speculative_tokens] + shift for row in rows]
    measured = [_number(row.speedup) for row in rows]
    low = [_number(row.speedup_spread and row.speedup_spread[0]) for row in rows]
    high = [_number(row.speedup_spread and row.speedup_spread[1]) for row in rows]
    axes.vlines(x, low, high, color=colour, alpha=0.28, linewidth=5)
    axes.plot(x, measured, "o-", color=colour, linewidth=2, markersize=6, zorder=4)
    hollow = {"color": colour, "linewidth": 1.2, "markersize": 5, "markerfacecolor": "white", "zorder": 3}
    axes.plot(x, [_number(row.predicted_speedup) for row in rows], "s--", **hollow)
    axes.plot(x, [_number(row.predicted_speedup_measured_verify) for row in rows], "^:", **hollow)


def _finish_speedup(axes: Any, places: Mapping[NumDrafted, int]) -> None:
    from matplotlib.lines import Line2D

    axes.axhline(1, color=_GREY, linewidth=0.8, zorder=1)
    axes.set(title="Speed-up over plain decoding", xlabel="K, drafted tokens per step")
    axes.set_xticks(list(places.values()), [str(k) for k in places])
    axes.set_xlim(-0.6, max(places.values(), default=0) + 0.6)
    _tidy(axes)
    top = axes.get_ylim()[1]
    axes.set_ylim(0, top * 1.28)  # room for the legend, so that it covers nothing
    hollow: dict[str, Any] = {"color": _GREY, "linewidth": 1.2, "markersize": 5, "markerfacecolor": "white"}
    kinds = [
        Line2D(
            [], [], color=_GREY, marker="o", linewidth=2, markersize=6, label="measured (bar: 10th to 90th percentile)"
        ),
        Line2D([], [], marker="s", linestyle="--", label="predicted, if a longer pass cost nothing", **hollow),
        Line2D([], [], marker="^", linestyle=":", label="predicted, with the measured cost of a pass", **hollow),
    ]
    axes.legend(handles=kinds, frameon=False, fontsize=8, loc="upper left")


def _draw_acceptance(axes: Any, name: str, row: Row, colour: str) -> None:
    shares = row.acceptance_by_position
    label = f"{name} (right: K {row.num_speculative_tokens})"
    axes.plot(range(1, len(shares) + 1), shares, "o-", color=colour, label=label, linewidth=2, markersize=6)


def _finish_acceptance(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes.set(title="Acceptance by position, given all before it", xlabel="position in the draft", ylim=(0, 1.03))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    _tidy(axes)


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.title.set_fontsize(11)


def _title(report: Report) -> str:
    environment, settings = report.environment, report.environment.get("settings", {})
    return (
        f"{environment.get('model')} ({environment.get('weights')}) on {environment.get('cpu')}, "
        f"batch {settings.get('concurrency')}, temperature {settings.get('temperature'):g}"
    )


def _number(value: float | None) -> float:
    return float("nan") if value is None else value

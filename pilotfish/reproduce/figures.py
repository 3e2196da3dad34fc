"""The report's picture: the paper's curves with what was measured on them. matplotlib is imported only inside.

It does not know how anything was measured. The one trick: curves are the formulas themselves, so a point off its curve
is a deviation that can be seen.

    tokens a pass by alpha (their Figure 2)     | best K by alpha, for a few c (their Figure 3)
    measured speed against predicted            | alpha by pair, beside theirs (their Table 3)
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..decoding.theory import best_num_drafted, expected_tokens
from ..errors import OptionError
from . import paper
from .findings import Findings
from .predict import AGREE

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # told apart by colour-blind eyes too
_GREY = "#666666"
_COSTS = (0.01, 0.05, 0.1, 0.2, 0.4)


def check() -> None:
    """Raises OptionError if there could be no picture, so that this is known before hours of measuring."""
    if find_spec("matplotlib") is None:
        raise OptionError("the report needs matplotlib: install it, or 'pilotfish[plot]'")


def draw(found: Sequence[Findings], path: Path) -> None:
    """Write the PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9.6), layout="constrained")
    FigureCanvasAgg(figure)  # no window, no global state of pyplot
    (tokens, best), (speed, alphas) = figure.subplots(2, 2)
    colours = {one.name: _COLOURS[i % len(_COLOURS)] for i, one in enumerate(found)}
    _draw_tokens(tokens, found, colours)
    _draw_best(best, found, colours)
    _draw_speed(speed, found, colours)
    _draw_alphas(alphas, found, colours)
    for axes in (tokens, best, speed, alphas):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.title.set_fontsize(11)
    figure.savefig(path, dpi=130)


def _draw_tokens(axes: Any, found: Sequence[Findings], colours: dict[str, str]) -> None:
    xs = [i / 100 for i in range(100)]
    drafted = sorted({speed.prediction.num_drafted for one in found for speed in one.speeds}) or [1, 3, 5, 7]
    for i, k in enumerate(drafted):
        shade = 0.75 - 0.6 * i / max(1, len(drafted) - 1)
        axes.plot(xs, [expected_tokens(x, k) for x in xs], color=str(shade), linewidth=1.2)
        axes.annotate(f"K = {k}", (0.99, expected_tokens(0.99, k)), fontsize=8, color=str(shade), ha="right")
    for one in found:
        for temperature, marker in ((0.0, "o"), (1.0, "^")):
            own = [s.prediction for s in one.speeds if s.temperature == temperature]
            label = f"{one.name}, temperature {temperature:g}" if own else None
            points = ([p.alpha for p in own], [p.tokens for p in own])
            axes.plot(*points, marker, color=colours[one.name], markersize=6, label=label, alpha=0.85)
    axes.set(title="Tokens a pass: the formula, and measured", xlabel="alpha, on the target's text", xlim=(0, 1))
    if any(one.speeds for one in found):
        axes.legend(frameon=False, fontsize=8, loc="upper left")


def _draw_best(axes: Any, found: Sequence[Findings], colours: dict[str, str]) -> None:
    xs = [i / 200 for i in range(20, 190)]
    for i, c in enumerate(_COSTS):
        shade = 0.15 + 0.6 * i / (len(_COSTS) - 1)
        axes.step(xs, [best_num_drafted(x, c) for x in xs], color=str(shade), linewidth=1.2, label=f"c = {c:g}")
    for one in found:
        for best in one.best:
            marker = "o" if best.temperature == 0 else "^"
            axes.plot([best.alpha], [best.measured], marker, color=colours[one.name], markersize=6, alpha=0.85)
    axes.set(title="Best K: the formula, and of those measured", xlabel="alpha", xlim=(0, 1), ylim=(-0.5, 16))
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _draw_speed(axes: Any, found: Sequence[Findings], colours: dict[str, str]) -> None:
    highest = 1.5
    for one in found:
        for temperature, marker in ((0.0, "o"), (1.0, "^")):
            own = [s.prediction for s in one.speeds if s.temperature == temperature]
            measured = [p.measured for p in own]
            hollow = {"markerfacecolor": "white", "alpha": 0.6}
            axes.plot([p.formula for p in own], measured, marker, color=colours[one.name], markersize=5, **hollow)
            axes.plot([p.with_runs for p in own], measured, marker, color=colours[one.name], markersize=6)
            highest = max([highest, *measured, *(p.formula for p in own)])
    theirs = [(speed.predicted, speed.measured) for speed in paper.SPEEDS]
    axes.plot(*zip(*theirs, strict=True), "x", color=_GREY, markersize=5, label="the paper's, T5-XXL on a TPU")
    ends = [0.0, max(highest, 3.6)]
    axes.plot(ends, ends, color=_GREY, linewidth=0.8)
    axes.fill_between(ends, [x * (1 - AGREE) for x in ends], [x * (1 + AGREE) for x in ends], color="#eeeeee")
    axes.plot([], [], "o", color="black", label="with rows and runs as they cost and come here")
    axes.plot([], [], "o", color="black", markerfacecolor="white", label="the paper's formula")
    axes.set(
        title="Speed over plain decoding (band: 15 %)", xlabel="predicted", ylabel="measured", xlim=ends, ylim=ends
    )
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _draw_alphas(axes: Any, found: Sequence[Findings], colours: dict[str, str]) -> None:
    bars: list[tuple[str, float, float, str]] = []
    for one in found:
        greedy, drawn = one.alphas[0.0], one.alphas[1.0]
        for name in greedy:
            if name in drawn:
                bars.append((f"{one.name}: {name}", greedy[name].alpha, drawn[name].alpha, colours[one.name]))
    bars += [(f"paper, {row.target.split(',')[0]}: {row.draft}", row.greedy, row.drawn, "#999999")
             for row in paper.ALPHAS]  # fmt: skip
    for place, (_, dark, light, colour) in enumerate(bars):
        axes.barh(place - 0.2, dark, 0.38, color=colour)
        axes.barh(place + 0.2, light, 0.38, color=colour, alpha=0.45)
    axes.set_yticks(range(len(bars)), [name for name, *_ in bars], fontsize=7)
    axes.invert_yaxis()
    axes.set(title="alpha at temperature 0 (dark) and 1 (light)", xlim=(0, 1))

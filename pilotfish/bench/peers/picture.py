"""The results as a picture: per category a bar for each engine, its fastest variant; a line marks plain decoding.

matplotlib is an extra and is imported only here. The one trick: an engine's fastest variant is chosen over all prompts,
once, not per category, or every engine would be shown as nobody can run it.
"""

from collections.abc import Sequence
from pathlib import Path

from ..results import ALL
from .engines import PLAIN
from .report import PeerRow

_COLOURS = ("#0072B2", "#D55E00", "#E69F00", "#009E73", "#8BC6A9", "#666666", "#CC79A7", "#56B4E9")
_GREY = "#666666"


def fastest(rows: Sequence[PeerRow]) -> dict[tuple[str, str], str]:
    """{(engine, weights): its variant with the most tokens per second over all prompts}."""
    best: dict[tuple[str, str], PeerRow] = {}
    for row in rows:
        key = (row.engine, row.weights)
        if row.category != ALL or row.tokens_per_second is None:
            continue
        if key not in best or row.tokens_per_second > (best[key].tokens_per_second or 0):
            best[key] = row
    return {key: row.variant for key, row in best.items()}


def draw(rows: Sequence[PeerRow], title: str, path: str) -> None:
    """Write the PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    speed = {(*row.key, row.category): row.tokens_per_second or 0.0 for row in rows}
    categories = list(dict.fromkeys(row.category for row in rows if row.category != ALL))
    names = [ALL, *categories] if len(categories) > 1 else [ALL]
    chosen = fastest(rows)
    figure = Figure(figsize=(max(10.0, 1.15 * len(names) + 2), 4.8), layout="constrained")
    FigureCanvasAgg(figure)  # no window, no global state of pyplot
    axes = figure.subplots()
    width = 0.84 / max(1, len(chosen))
    for i, ((engine, weights), variant) in enumerate(chosen.items()):
        x = [place + (i - (len(chosen) - 1) / 2) * width for place in range(len(names))]
        heights = [speed.get((engine, weights, variant, name), 0.0) for name in names]
        label = f"{engine} {weights}: {variant}"
        axes.bar(x, heights, width * 0.92, color=_COLOURS[i % len(_COLOURS)], label=label)
        plain = [speed.get((engine, weights, PLAIN, name), float("nan")) for name in names]
        axes.hlines(
            plain, [at - width * 0.46 for at in x], [at + width * 0.46 for at in x], color="black", linewidth=1.4
        )
    axes.set_xticks(range(len(names)), [name.replace("_", " ") for name in names], rotation=25, ha="right")
    axes.set_ylabel("tokens per second")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_title("Decoding speed: each engine's fastest way; the line is its plain decoding", fontsize=11)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=9.5, color=_GREY)
    figure.savefig(Path(path).expanduser(), dpi=150)

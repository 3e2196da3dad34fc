"""Curves of a training: a line of JSON per entry, and a picture.

They do not know what is trained. The one trick: going on from a checkpoint cuts off what came behind it, so the file
reads as if the run had never stopped. matplotlib is an extra and is imported only where it draws.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")


class Curves:
    """last_step: entries of later steps are dropped."""

    def __init__(self, path: Path, last_step: int):
        self.path = path
        self.entries = [entry for entry in _read(path) if entry["step"] <= last_step]
        self._write("".join(_line(entry) for entry in self.entries), "w")

    def add(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)
        self._write(_line(entry), "a")

    def _write(self, text: str, mode: str) -> None:
        try:
            with self.path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError:
            return  # a full disk: what is lost is a line of a log, and the checkpoint tells of the disk

    def draw(self, path: Path) -> bool:
        """Write the PNG; False if matplotlib is not installed or there is nothing to draw."""
        if find_spec("matplotlib") is None or not self.entries:
            return False
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        learnt = [entry for entry in self.entries if entry["split"] == "train"]
        tested = [entry for entry in self.entries if entry["split"] == "held_out"]
        for name, entries, style in (("training", learnt, "-"), ("held out", tested, "o--")):
            left.plot([e["step"] for e in entries], [e["loss"][0] for e in entries], style, label=name, markersize=4)
        for position in range(max((len(e["accuracy"]) for e in tested or learnt), default=0)):
            for entries, style in ((learnt, "-"), (tested, "o--")):
                points = [(e["step"], e["accuracy"][position]) for e in entries if position < len(e["accuracy"])]
                label = f"guess {position + 1}" if style == "o--" else None
                colour = _COLOURS[position % len(_COLOURS)]
                alpha = 0.35 if style == "-" else 1.0
                steps, shares = [point[0] for point in points], [point[1] for point in points]
                right.plot(steps, shares, style, color=colour, label=label, markersize=4, alpha=alpha)
        left.set(title="Loss of the first guess", xlabel="step")
        right.set(title="Guesses that are the target's own (points: held out)", xlabel="step", ylim=(0, None))
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="#dddddd", linewidth=0.6)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False, fontsize=9)
        partial = path.with_name(f".{path.name}")
        try:
            figure.savefig(partial, dpi=130, format="png")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        return True


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry) + "\n"


def _read(path: Path) -> list[dict[str, Any]]:
    """The entries; a line torn by a kill is no entry."""
    entries = []
    if path.exists():
        for line in path.read_bytes().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and {"step", "split", "loss", "accuracy"} <= entry.keys():
                entries.append(entry)
    return entries

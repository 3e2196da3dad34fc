"""The trace as one self-contained HTML file: nothing from elsewhere; both themes; a telephone's width.

It does not know engines. The one trick: trees are laid out by `telling`, so drawing them is adding up rows, and the
template escapes everything that a model said.
"""

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from ..errors import OptionError
from .telling import METHOD, Line, Record, balance, beginning, ending, gain, lines, number, rule_in_words, shown, totals

_ROW, _COLUMN, _LEFT, _GAP, _BAR = 40, 18, 12, 12, 128  # pixels
_WORD, _SMALL = 7.9, 6.7  # of a letter


def write_page(path: str | Path, records: Sequence[Record], about: Mapping[str, str]) -> None:
    """about: prompt, and the start-up line as ``model``. Raises OptionError if the file cannot be written."""
    try:
        Path(path).expanduser().write_text(page(records, about), encoding="utf-8")
    except OSError as error:
        raise OptionError(f"the page cannot be written to {str(path)!r}: {error.strerror}") from error


def page(records: Sequence[Record], about: Mapping[str, str]) -> str:
    """The page's source."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"shown": shown, "number": number}
    source = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    rules = list(dict.fromkeys(one["rule"] for one in records))
    return environment.from_string(source).render(
        about=about,
        method=METHOD,
        rules=[rule_in_words(rule) for rule in rules],
        totals=totals(records),
        passes=[_of_pass(records, index) for index in range(len(records))],
    )


def _of_pass(records: Sequence[Record], index: int) -> dict[str, Any]:
    one = records[index]
    before = "".join("".join(earlier["pieces"]) for earlier in records[:index])
    return {
        "number": one["pass"],
        "given": [(piece, i < one["num_accepted"]) for i, piece in enumerate(one["pieces"])],
        "before": before if len(before) <= 60 else f"…{before[-60:]}",
        "beginning": beginning(one),
        "ending": ending(one),
        "gain": f"{gain(one)} {balance(records[: index + 1])}",
        "tree": _drawing(lines(one)) if one["nodes"] else None,
        "rest": one["last"]["top"] if one["last"]["kind"] == "residual" else None,
        "rest_token": one["last"]["token"][0],
        "laws": [_law(one, row) for row in one["rows"]],
        "num_tokens": len(one["ids"]),
        "num_guesses": len(one["nodes"]),
    }


def _law(one: Record, row: Mapping[str, Any]) -> dict[str, Any]:
    """The target's law behind one token of the path, and what came of it."""
    depth = 0 if row["after"] == -1 else one["path"].index(row["after"]) + 1
    said = [*(one["nodes"][node]["id"] for node in one["path"]), one["last"]["token"][0]][depth]
    behind = "the text so far" if depth == 0 else one["draft"]["tokens"][row["after"]]
    return {"behind": behind, "whole": depth == 0, "top": row["top"], "said": said}


def _drawing(found: Sequence[Line]) -> dict[str, Any]:
    """Places, in pixels. A line's dot is at (x, y); its edge comes down from its parent and turns."""
    placed, bar_x = [], 0
    for row, line in enumerate(found):
        x, y = _LEFT + line.column * _COLUMN, 16 + row * _ROW
        edge = None
        if line.parent >= 0:
            from_x, from_y = _LEFT + found[line.parent].column * _COLUMN, 16 + line.parent * _ROW
            edge = f"M{from_x} {from_y + 6}V{y}H{x - 6}" if x != from_x else f"M{x} {from_y + 6}V{y - 6}"
        placed.append({"line": line, "x": x, "y": y, "edge": edge})
        bar_x = max(bar_x, round(x + 2 * _GAP + max(_WORD * len(line.text), _SMALL * len(line.numbers))))
    width = bar_x + max(_BAR, round(_SMALL * max(len(line.why) for line in found))) + 4
    return {"lines": placed, "bar_x": bar_x, "bar": _BAR, "width": width, "height": len(found) * _ROW + 4}

"""A bench report for people, a table, and for programs: the last line of stdout is one JSON document.

It does not know how anything was measured. What the columns mean is written in `pilotfish.bench.results`.
"""

import json
import math
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .results import ALL, Report, Row, Spread

_WIDTH = 128  # where the output is not a terminal, so that tables in files are not squeezed
_MOST_NOTES = 12
_FIGURES = (
    "tokens/s",
    "speed-up",
    "predicted",
    "tokens\nper pass",
    "alpha",
    "c",
    "K+1 rows\n/ 1 row",
    "first\ntoken",
    "same\ntext",
)


def document(report: Report) -> dict[str, Any]:
    """{"rows": [...], "environment": {...}}, all of it JSON; what was not measured or does not apply is null."""
    return {"rows": [_clean(asdict(row)) for row in report.rows], "environment": _clean(report.environment)}


def print_report(report: Report, console: Console | None = None) -> None:
    """The table, then the document on the last line of stdout (the console's file)."""
    console = console or _console()
    settings = report.environment.get("settings", {})
    if report.rows:
        console.print(_table(report))
        for note in _notes(report):
            console.print(note, highlight=False, soft_wrap=True)
    else:
        console.print("nothing was measured")
    if report.environment.get("interrupted"):
        console.print("interrupted: this is what was measured until then", style="yellow")
    if settings.get("plot") and report.rows:
        console.print(f"drawn into {settings['plot']}", highlight=False, soft_wrap=True)
    # Not through the console, which would wrap and colour it.
    print(json.dumps(document(report), allow_nan=False), file=console.file, flush=True)


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


def _table(report: Report) -> Table:
    environment = report.environment
    settings = environment.get("settings", {})
    title = f"{environment.get('model')}, {environment.get('dtype')}, {environment.get('cpu')}"
    caption = (
        f"{environment.get('num_prompts')} prompts, {settings.get('repeats')} repeats, batch "
        f"{settings.get('concurrency')}, temperature {settings.get('temperature'):g}. Decoding only, prompts not "
        "counted. Small figures: 10th to 90th percentile. Predicted: by the paper's formula with the measured "
        "acceptance and c; with the measured cost of longer passes as well."
    )
    table = Table(title=title, caption=caption, header_style="bold", caption_justify="left", expand=False)
    for name in ("method", "K", "category"):
        table.add_column(name, justify="right" if name == "K" else "left", no_wrap=True)
    for name in _FIGURES:
        table.add_column(name, justify="right", no_wrap=True)
    rows, categories = report.rows, {row.category for row in report.rows} - {ALL}
    for i, row in enumerate(rows):
        if row.category == ALL and len(categories) == 1:  # says nothing new
            continue
        ends = i + 1 == len(rows) or _variant(rows[i + 1]) != _variant(row)
        following = i + 2 < len(rows) and len(categories) == 1 and rows[i + 1].category == ALL
        table.add_row(*_cells(row), end_section=ends or following, style="bold" if row.category == ALL else None)
    return table


def _variant(row: Row) -> tuple[str, int, str]:
    return row.method, row.num_speculative_tokens, row.drafter


def _cells(row: Row) -> list[Text | str]:
    plain = row.method == "none"
    colour = (
        "" if plain or row.speedup is None else "green" if row.speedup > 1.02 else "red" if row.speedup < 0.98 else ""
    )
    predicted = "" if plain else f"{_show(row.predicted_speedup)}, {_show(row.predicted_speedup_measured_verify)}"
    same = {True: Text("yes", "green"), False: Text(f"{len(row.divergences)} differ", "red"), None: Text("-")}
    return [
        "plain" if plain else row.method,
        "" if plain else str(row.num_speculative_tokens),
        row.category,
        _with_spread(row.tokens_per_second, row.tokens_per_second_spread, 1),
        "" if plain else _with_spread(row.speedup, row.speedup_spread, 2, colour),
        predicted,
        _show(row.mean_acceptance_length),
        "" if plain else _show(row.alpha),
        "" if plain else _show(row.c, 3),
        "" if plain else _show(row.verify_ratio),
        "-" if row.time_to_first_token is None else f"{1e3 * row.time_to_first_token:.0f} ms",
        same[row.identical],
    ]


def _show(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _with_spread(value: float | None, spread: Spread | None, digits: int, style: str = "") -> Text:
    text = Text(_show(value, digits), style)
    if spread is not None:
        text.append(f" {_show(spread[0], digits)}-{_show(spread[1], digits)}", "dim not bold")
    return text


def _notes(report: Report) -> list[Text]:
    """Which drafter is which, where texts part, and what went wrong."""
    notes = []
    summaries = [row for row in report.rows if row.category == ALL]
    for method, drafter in dict.fromkeys((row.method, row.drafter) for row in summaries if row.drafter):
        notes.append(Text(f"{method}: {drafter}", "dim"))
    for row in summaries:
        name = "plain decoding" if row.method == "none" else f"{row.method}, K {row.num_speculative_tokens}"
        if row.num_failed_drafts:
            notes.append(Text(f"{name}: the drafter failed in {row.num_failed_drafts} steps (see the log)", "red"))
        for divergence in row.divergences[:_MOST_NOTES]:
            apart = "one text ends" if divergence.margin is None else f"margin {divergence.margin:.2g} logits"
            where = f"{divergence.prompt} parts from plain decoding at token {divergence.position} ({apart})"
            notes.append(Text(f"{name}: {where}", "yellow"))
        if len(row.divergences) > _MOST_NOTES:
            notes.append(Text(f"{name}: {len(row.divergences) - _MOST_NOTES} more", "yellow"))
    return notes


def _clean(value: Any) -> Any:
    """JSON has no infinities and no NaN."""
    if isinstance(value, dict):
        return {str(key): _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

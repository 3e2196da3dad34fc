"""A bench report for people, a table, and for programs: one JSON document, the last line of a file or a pipe.

It does not know how anything was measured. What the columns mean is written in `pilotfish.bench.results`. A terminal
has people before it, so there the document is left out.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .results import ALL, Report, Row, Spread

_WIDE, _WIDER = 136, 152  # columns for everything, without and with a draft model's passes
_MOST_NOTES = 12


def document(report: Report) -> dict[str, Any]:
    """{"rows": [...], "environment": {...}}, all of it JSON; what was not measured or does not apply is null."""
    return {"rows": [_clean(asdict(row)) for row in report.rows], "environment": _clean(report.environment)}


def print_report(report: Report, console: Console | None = None, *, as_json: bool = False) -> None:
    """The table, then the document on the last line of stdout (the console's file), unless that is a terminal.

    as_json: the document alone, wherever it goes.
    """
    console = console or new_console()
    if not as_json:
        _print_table(report, console)
    if as_json or not console.file.isatty():
        # Not through the console, which would wrap and colour it.
        print(json.dumps(document(report), allow_nan=False), file=console.file, flush=True)


def _print_table(report: Report, console: Console) -> None:
    """With what there is to say about it."""
    settings = report.environment.get("settings", {})
    if report.rows:
        passes = any(row.draft_passes_per_token is not None for row in report.rows)
        console.print(_table(report, console.width >= (_WIDER if passes else _WIDE)))
        for note in _notes(report):
            console.print(note, highlight=False, soft_wrap=True)
    else:
        console.print("nothing was measured")
    if report.environment.get("interrupted"):
        console.print("interrupted: this is what was measured until then", style="yellow")
    if settings.get("plot") and report.rows:
        console.print(f"drawn into {settings['plot']}", highlight=False, soft_wrap=True)


def new_console() -> Console:
    """For tables: as wide as the terminal, or wide enough where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDER)


def _table(report: Report, wide: bool) -> Table:
    environment = report.environment
    settings = environment.get("settings", {})
    table = Table(
        title=f"{environment.get('model')}, {environment.get('weights')}, {environment.get('cpu')}",
        caption=_caption(environment.get("num_prompts"), settings, wide),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        header_style="bold",
    )
    columns = {
        name: cell
        for name, cell in _COLUMNS.items()
        if (wide or name not in _ONLY_WIDE) and any(str(cell(row, wide)) not in ("", "-") for row in report.rows)
    }
    for name in columns:
        table.add_column(name, justify="left" if name in ("method", "category") else "right", no_wrap=True)
    one_category = len({row.category for row in report.rows} - {ALL}) == 1
    rows = [row for row in report.rows if not (one_category and row.category == ALL)]  # it would say nothing new
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(
            *(cell(row, wide) for cell in columns.values()),
            style="bold" if row.category == ALL else None,
            end_section=following is not None and following.key != row.key,
        )
    return table


def _caption(num_prompts: Any, settings: dict[str, Any], wide: bool) -> str:
    return (
        f"{num_prompts} prompts, {settings.get('repeats')} repeats, batch {settings.get('concurrency')}, temperature "
        f"{settings.get('temperature'):g}. Decoding alone is timed, reading the prompt is not. "
        + ("Behind the speeds: 10th to 90th percentile. " if wide else "")
        + "Predicted: by the paper's formula from the measured acceptance and c, if a longer pass cost nothing; and "
        "with what it costs here."
    )


def name_of(row: Row) -> str:
    """In a table: method and K."""
    return "plain" if row.method == "none" else f"{row.method} {row.num_speculative_tokens}"


def _tokens_per_second(row: Row, wide: bool) -> Text:
    return _with_spread(row.tokens_per_second, row.tokens_per_second_spread if wide else None, 1)


def _speedup(row: Row, wide: bool) -> Text:
    if row.method == "none" or row.speedup is None:
        return Text("" if row.method == "none" else "-")
    colour = "green" if row.speedup > 1.02 else "red" if row.speedup < 0.98 else ""
    return _with_spread(row.speedup, row.speedup_spread if wide else None, 2, colour)


def _predicted(row: Row, wide: bool) -> str:
    if row.method == "none":
        return ""
    return f"{_show(row.predicted_speedup)}, {_show(row.predicted_speedup_measured_verify)}"


def _same_text(row: Row, wide: bool) -> Text:
    if row.identical is None:
        return Text("-")
    return Text("yes", "green") if row.identical else Text(f"{len(row.divergences)} differ", "red")


def _first_token(row: Row, wide: bool) -> str:
    return "-" if row.time_to_first_token is None else f"{1e3 * row.time_to_first_token:.0f} ms"


def _unless_plain(name: str, digits: int = 2) -> Callable[[Row, bool], str]:
    return lambda row, _wide: "" if row.method == "none" else _show(getattr(row, name), digits)


_COLUMNS: dict[str, Callable[[Row, bool], Text | str]] = {
    "method": lambda row, _wide: name_of(row),
    "category": lambda row, _wide: row.category,
    "tokens/s": _tokens_per_second,
    "speed-up": _speedup,
    "predicted": _predicted,
    "tokens\na pass": lambda row, _wide: _show(row.mean_acceptance_length),
    "nodes\na pass": _unless_plain("nodes_per_pass", 1),
    "alpha": _unless_plain("alpha"),
    "c": _unless_plain("c", 3),
    "draft passes\na token": _unless_plain("draft_passes_per_token"),
    "K+1 rows\n/ 1 row": _unless_plain("verify_ratio"),
    "first\ntoken": _first_token,
    "same\ntext": _same_text,
}
_ONLY_WIDE = {"nodes\na pass", "alpha", "c", "draft passes\na token", "K+1 rows\n/ 1 row", "first\ntoken"}


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

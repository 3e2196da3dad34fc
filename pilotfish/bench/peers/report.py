"""From runs to one table and one JSON document.

It does not know engines or how they ran. The one trick: a drafting variant's texts are compared with plain decoding of
the same engine and weights alone, for other arithmetic may say other words.

    tokens_per_second   of one run: the tokens after the first burst over the time they took; a row has the median
    first_token_seconds the median
    over_plain          of a category: tokens per second over those of the same engine's plain decoding; of all: the
                        mean over the categories
    same_text           share of prompts whose text is that engine's own plain text, the end token apart
    peak_bytes          the most resident in the process while it decoded; load_peak_bytes: while it loaded
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..environment import commit, cpu_model
from ..results import ALL
from .engines import PLAIN, Engine
from .journal import Load, Run
from .run import Outcome
from .task import Task

_WIDE = 118  # columns besides those of the categories
_BUSY = 0.05  # of a core, used by engines that should wait


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One variant on one category, or on ``all``. None: not measured, or does not apply."""

    engine: str
    weights: str
    variant: str
    category: str
    num_prompts: int
    tokens_per_second: float | None
    first_token_seconds: float | None
    same_text: float | None
    peak_bytes: int
    load_peak_bytes: int | None = None
    version: str = ""
    precision: str = ""
    over_plain: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.engine, self.weights, self.variant


def rows_of(runs: Sequence[Run], loads: Sequence[Load], stop_ids: Sequence[int] = ()) -> list[PeerRow]:
    """For each variant in the order in which it first ran: all, then each category."""
    texts = {(run.key, run.prompt): _text(run, stop_ids) for run in runs}
    about = {(load.engine, load.weights, variant): load for load in loads for variant in load.variants}
    grouped: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    for run in runs:
        grouped[run.key].append(run)
    rows = []
    order = {key: place for place, key in enumerate(about)}
    for key in sorted(grouped, key=lambda key: order.get(key, len(order))):
        own = grouped[key]
        for category in (ALL, *dict.fromkeys(run.category for run in own)):
            some = [run for run in own if category in (ALL, run.category)]
            rows.append(_row(key, category, some, texts, about.get(key)))
    return _over_plain(rows)


def _over_plain(rows: Sequence[PeerRow]) -> list[PeerRow]:
    plain = {(r.engine, r.weights, r.category): r.tokens_per_second for r in rows if r.variant == PLAIN}
    ratios: dict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    for row in rows:
        slow = plain.get((row.engine, row.weights, row.category))
        if row.category != ALL and row.variant != PLAIN and row.tokens_per_second and slow:
            ratios[row.key][row.category] = row.tokens_per_second / slow
    means = {key: fmean(own.values()) for key, own in ratios.items()}
    return [
        replace(row, over_plain=means.get(row.key) if row.category == ALL else ratios[row.key].get(row.category))
        for row in rows
    ]


def _row(
    key: tuple[str, str, str],
    category: str,
    runs: Sequence[Run],
    texts: dict[tuple[tuple[str, str, str], int], tuple[int, ...]],
    load: Load | None,
) -> PeerRow:
    engine, weights, variant = key
    rates = [run.rate for run in runs if run.rate is not None]
    firsts = [run.first_token_seconds for run in runs if run.first_token_seconds is not None]
    plain = (engine, weights, PLAIN)
    same = [texts[key, run.prompt] == texts[plain, run.prompt] for run in runs if (plain, run.prompt) in texts]
    return PeerRow(
        engine=engine,
        weights=weights,
        variant=variant,
        category=category,
        num_prompts=len(runs),
        tokens_per_second=median(rates) if rates else None,
        first_token_seconds=median(firsts) if firsts else None,
        same_text=sum(same) / len(same) if same and variant != PLAIN else None,
        peak_bytes=max(run.peak_bytes for run in runs),
        load_peak_bytes=None if load is None else load.peak_bytes,
        version="" if load is None else load.version,
        precision="" if load is None else load.precision,
    )


def _text(run: Run, stop_ids: Sequence[int]) -> tuple[int, ...]:
    """The ids without the end token, which some engines report and others keep."""
    return run.ids[:-1] if run.ids and run.ids[-1] in stop_ids else run.ids


def document(task: Task, outcome: Outcome, rows: Sequence[PeerRow]) -> dict[str, Any]:
    """{"rows": [...], "environment": {...}, "failures": [...], "left_out": [...]}, all of it JSON."""
    return {
        "rows": [asdict(row) for row in rows],
        "environment": task.header()
        | {
            "cpu": cpu_model(),
            "commit": commit(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {load.engine: load.version for load in outcome.journal.loads},
            "groups": outcome.groups,
            "interrupted": outcome.interrupted,
        },
        "failures": [{"what": what, "why": why} for what, why in outcome.failures],
        "left_out": outcome.left_out,
    }


def print_report(
    task: Task, outcome: Outcome, rows: Sequence[PeerRow], engines: Sequence[Engine], console: Console | None = None
) -> None:
    """The table and what there is to say about it; the document into its file, and where stdout is no terminal, as the
    last line there too."""
    categories = list(dict.fromkeys(row.category for row in rows if row.category != ALL))
    if console is None:
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=_WIDE + 9 * len(categories))
    if rows:
        console.print(_table(task, rows, categories))
    else:
        console.print("nothing was measured")
    for note in _notes(outcome, rows, engines):
        console.print(note, markup=False, soft_wrap=True)
    found = document(task, outcome, rows)
    Path(task.options.out).expanduser().write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not console.file.isatty():
        print(json.dumps(found), file=console.file, flush=True)


def _table(task: Task, rows: Sequence[PeerRow], categories: Sequence[str]) -> Table:
    draft = "" if task.draft_model is None else f", drafted by {task.draft_model.name}"
    table = Table(
        title=f"{task.model.name}{draft}; {cpu_model()}, {task.options.num_threads} threads",
        caption=f"{len(task.ids)} prompts, {task.options.max_tokens} tokens each, greedy, batch 1. Tokens per second "
        "after the first, medians over prompts. Over plain: the mean over the categories. Same text: as the same "
        "engine's plain decoding.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        header_style="bold",
    )
    for name in ("engine", "weights", "decoding"):
        table.add_column(name, no_wrap=True)
    for name in (
        ALL,
        *(categories if len(categories) > 1 else ()),
        "over plain",
        "first token",
        "memory",
        "loading",
        "same text",
    ):
        table.add_column(name.replace("_", " "), justify="right")
    by_key: dict[tuple[str, str, str], dict[str, PeerRow]] = {}
    for row in rows:
        by_key.setdefault(row.key, {})[row.category] = row
    for (engine, weights, variant), own in by_key.items():
        last = own[ALL]
        cells = [_number(own[name].tokens_per_second) if name in own else "-" for name in (ALL, *categories)]
        if len(categories) == 1:
            cells = cells[:1]
        over = "" if last.over_plain is None else f"{last.over_plain:.2f}"
        first = "-" if last.first_token_seconds is None else f"{1e3 * last.first_token_seconds:.0f} ms"
        loading = "-" if last.load_peak_bytes is None else f"{last.load_peak_bytes / 1e9:.1f} GB"
        same = "" if last.same_text is None else f"{last.same_text:.0%}"
        shown = f"{weights} ({last.precision})" if weights == "as given" else weights
        table.add_row(
            engine, shown, variant, *cells, over, first, f"{last.peak_bytes / 1e9:.1f} GB", loading, same,
            style="bold" if engine == "pilotfish" else None,
        )  # fmt: skip
    return table


def _notes(outcome: Outcome, rows: Sequence[PeerRow], engines: Sequence[Engine]) -> list[str]:
    versions = {row.engine: row.version for row in rows if row.version}
    notes = [
        f"{engine.name} {versions[engine.name]}{f': {engine.note}' if engine.note else ''}"
        for engine in engines
        if engine.name in versions
    ]
    shared = [load for load in outcome.journal.loads if len(load.variants) > 1]
    for load in {(load.engine, load.weights, load.variants): load for load in shared}.values():
        notes.append(f"one process, and its memory, for {load.engine} {load.weights}: {'; '.join(load.variants)}")
    notes += [f"not run: {line}" for line in outcome.left_out]
    notes += [f"failed: {what}: {why}" for what, why in outcome.failures]
    if outcome.groups:
        groups = " | ".join(", ".join(dict.fromkeys(group)) for group in outcome.groups)
        notes.append(f"not all fitted into memory at once; taking turns within each of: {groups}")
    busy = max((run.idle_cpu for run in outcome.journal.runs), default=0.0)
    if busy > _BUSY:
        notes.append(f"engines that should have waited used up to {busy:.0%} of a core: see idle_cpu in the record")
    if outcome.interrupted:
        notes.append("interrupted: this is what was measured until then; the same command goes on")
    return notes


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"

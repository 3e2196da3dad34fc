"""`pilotfish tune`: measure what pays on the user's own prompts, rank it, and write the winner down.

It does not measure anything itself: it asks the bench for every method that fits and every K worth trying. The one
trick: plain decoding is in the ranking, so the answer can be "do not draft".
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from ..drafters import registry
from ..engine.options import EngineOptions
from ..errors import OptionError, UserError
from ..models.load import Loaded
from .measure import run_bench
from .options import BenchOptions
from .report import new_console
from .results import Report, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """Raises OptionError for values out of range (those of `BenchOptions`)."""

    prompts: str | None = field(default=None, metadata={"help": "JSONL with turns or prompt; our own few if unset"})
    limit: int = field(default=10, metadata={"help": "take this many prompts, spread over the categories"})
    repeats: int = field(default=2, metadata={"help": "how often each prompt is measured with each choice"})
    max_tokens: int = field(default=64, metadata={"help": "new tokens per prompt"})
    temperature: float = field(default=0.0, metadata={"help": "0 is greedy"})
    seed: int | None = field(default=None, metadata={"help": "fixes sampled texts"})
    concurrency: int = field(default=1, metadata={"help": "prompts of one category that run as one batch"})
    num_speculative_tokens: str = field(default="2,4,8,auto", metadata={"help": "the values of K to try"})
    out: str = field(default="pilotfish.json", metadata={"help": "where the winner is written"})

    def bench(self) -> BenchOptions:
        """What to ask of the bench."""
        values = asdict(self)
        del values["out"]
        return BenchOptions(**values)


@dataclass(frozen=True, slots=True)
class Choice:
    """One line of the ranking. config: what `--speculative-config` takes."""

    row: Row
    config: Mapping[str, Any]


def run_tune(
    options: TuneOptions,
    target: Loaded,
    speculations: Sequence[registry.Speculation],
    configs: Sequence[Mapping[str, Any]],
    *,
    engine: EngineOptions | None = None,
) -> list[Choice]:
    """Measure, rank by tokens per second over all prompts, write the winner to ``options.out``; best first.

    configs: of the speculations, in the same order. Raises OptionError if the file cannot be written.
    """
    bench, path = options.bench(), Path(options.out).expanduser()
    if not path.absolute().parent.is_dir():
        raise OptionError(f"{path} cannot be written: there is no folder {path.absolute().parent}")
    report = run_bench(bench, target, speculations, engine=engine)
    choices = ranking(report, configs)
    if choices:
        path.write_text(json.dumps(choices[0].config, indent=1) + "\n", encoding="utf-8")
    return choices


def ranking(report: Report, configs: Sequence[Mapping[str, Any]]) -> list[Choice]:
    """Every choice measured over all prompts, best first; plain decoding among them."""
    by_method = {str(config["method"]): config for config in configs}
    choices = []
    for row in report.rows:
        if row.category == "all" and row.tokens_per_second is not None:
            known = by_method.get(row.method)
            config = {"method": "none"} if known is None else {
                **known, "num_speculative_tokens": row.num_speculative_tokens}  # fmt: skip
            choices.append(Choice(row, config))
    return sorted(choices, key=lambda choice: -(choice.row.speedup or 0.0))


def fitting(
    target: Loaded, names: Sequence[str], config: Mapping[str, Any], engine: EngineOptions
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Configs of the methods that can draft for this target, and why the others cannot."""
    from ..inspection import obstacle

    length = min(engine.max_model_len or target.model.info.context, target.model.info.context)
    configs, reasons = [], {}
    for name in names:
        own = {**registry.known_to(name, config), "method": name}
        try:
            registry.parse(own)
        except UserError as error:
            reasons[name] = str(error)
            continue
        reason = obstacle(name, target, engine, length, config)
        if reason is None:
            configs.append(own)
        else:
            reasons[name] = reason
    return configs, reasons


def print_ranking(choices: Sequence[Choice], reasons: Mapping[str, str], out: str) -> None:
    """A table for people; the last line of stdout is the winner as JSON."""
    table = Table(title="what pays here")
    for name in ("method", "K", "tokens/s", "speed-up", "spread", "predicted", "tokens per pass", "same text"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for choice in choices:
        row = choice.row
        table.add_row(
            row.method,
            "" if row.method == "none" else str(row.num_speculative_tokens),
            _show(row.tokens_per_second, 1),
            _show(row.speedup),
            "" if row.speedup_spread is None else "-".join(map(_show, row.speedup_spread)),
            _show(row.predicted_speedup_measured_verify),
            _show(row.mean_acceptance_length),
            {True: "yes", False: "no", None: ""}[row.identical],
        )
    screen = new_console()
    screen.print(table)
    for method, reason in reasons.items():
        screen.print(f"not tried: {method}: {reason}", highlight=False)
    if choices:
        screen.print(f"the winner is in {out}: use it with --speculative-config @{out}", highlight=False)
        print(json.dumps(choices[0].config))


def _show(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"

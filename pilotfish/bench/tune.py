"""`pilotfish tune`: measure what pays on the user's own prompts, rank it, and write the winner down.

It does not measure anything itself: it asks the bench for every method that fits and every K worth trying. The one
trick: plain decoding is in the ranking, so the answer can be "do not draft".
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ..drafters import registry
from ..drafters.draft_model import LISTED
from ..engine.options import EngineOptions
from ..errors import OptionError, UserError
from ..models.load import Loaded
from .measure import run_bench
from .options import TuneOptions as TuneOptions
from .report import new_console
from .results import Report, Row
from .vocabulary import count_own_text, prompts_to_count


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
    found: dict[str, list[str]] = {}  # of each method its drafters, in the order of their configs
    choices = []
    for row in report.rows:
        if row.category == "all" and row.tokens_per_second is not None:
            drafters = found.setdefault(row.method, [])
            if row.drafter not in drafters:
                drafters.append(row.drafter)
            own = [config for config in configs if config["method"] == row.method]
            config = {"method": "none"} if not own else {
                **own[drafters.index(row.drafter)], "num_speculative_tokens": row.num_speculative_tokens}  # fmt: skip
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


def with_frequent_tokens(
    options: TuneOptions, target: Loaded, configs: Sequence[Mapping[str, Any]], engine: EngineOptions
) -> list[dict[str, Any]]:
    """Configs of the draft models among these once more, proposing the target's most frequent tokens only.

    The list is counted here and written beside ``options.out``. None for a vocabulary that is small anyway, and for
    configs that name a list of their own. Raises OptionError if the list cannot be written.
    """
    num_ids = target.model.info.vocab_size
    path = Path(options.out).expanduser().absolute().with_suffix(".vocabulary.json")
    more = []
    for config in configs:
        has_lists = "draft_vocabulary" in registry.known_to(str(config["method"]), {"draft_vocabulary": ""})
        if has_lists and "draft_vocabulary" not in config and config.get("draft_vocab_size", LISTED) < num_ids:
            more.append({**config, "draft_vocabulary": str(path)})
    if not more or target.model.info.encoder_decoder:  # what is counted is one text, not what is said to a source
        return []
    prompts, apart = prompts_to_count(options)
    frequencies = count_own_text(target, prompts, options, engine)
    frequencies.write(path)
    note = "" if apart else "; they are also what is measured, so acceptance on other prompts may be lower"
    new_console().print(
        f"{path} lists the {len(frequencies.ids)} tokens of {len(prompts)} prompts and their answers{note}",
        highlight=False,
    )
    return more


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

"""`pilotfish tune`: measure what pays on the user's own prompts, rank it, and write the winner down.

It does not measure anything itself: it asks the bench for every method that fits and every K worth trying. The one
trick: plain decoding is in the ranking, so the answer can be "do not draft". It says how sure it is: choices are
compared prompt by prompt, as two prompts differ far more than two choices do.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.table import Table

from ..drafters import registry
from ..drafters.draft_model import LISTED
from ..engine.options import EngineOptions
from ..errors import OptionError, UserError
from ..models.load import Loaded
from .measure import run_bench
from .options import TuneOptions as TuneOptions
from .report import name_of, new_console
from .results import Report, Row
from .vocabulary import count_own_text, prompts_to_count

# The points of Student's t with 1, 2, ... degrees of freedom between which 95 % lie.
_T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
_T_95_BEYOND = 2.23


@dataclass(frozen=True, slots=True)
class Choice:
    """One line of the ranking. config: what `--speculative-config` takes. speedups: per batch of prompts."""

    row: Row
    config: Mapping[str, Any]
    speedups: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ranking:
    """Best first. interrupted: the winner is one so far, and was not written."""

    choices: Sequence[Choice]
    interrupted: bool = False


def run_tune(
    options: TuneOptions,
    target: Loaded,
    speculations: Sequence[registry.Speculation],
    configs: Sequence[Mapping[str, Any]],
    *,
    engine: EngineOptions | None = None,
) -> Ranking:
    """Measure, rank by the speed-up over all prompts, write the winner to ``options.out`` unless Ctrl-C came before.

    configs: of the speculations, in the same order. Raises OptionError if the file cannot be written.
    """
    bench, path = options.bench(), Path(options.out).expanduser()
    if not path.absolute().parent.is_dir():
        raise OptionError(f"{path} cannot be written: there is no folder {path.absolute().parent}")
    report = run_bench(bench, target, speculations, engine=engine)
    choices, interrupted = ranking(report, configs), bool(report.environment["interrupted"])
    if choices and not interrupted:  # half a measurement shall not replace what a whole one found
        path.write_text(json.dumps(choices[0].config, indent=1) + "\n", encoding="utf-8")
    return Ranking(choices, interrupted)


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
            choices.append(Choice(row, config, report.speedups.get(row.key, {})))
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


def confidence(choices: Sequence[Choice], repeats: int) -> list[str]:
    """What the winner rests on, in words: how many prompts, how sure its speed-up is, and what is too close to it."""
    best, *others = choices
    num_prompts = best.row.num_prompts
    about = f"chosen from {num_prompts} prompts, {repeats} repeats each: {name_of(best.row)}"
    if best.row.method != "none":
        mean, error = _interval(list(best.speedups.values()))
        about += f", {mean:.2f} x plain decoding"
        about += f", give or take {error:.2f} (95 % confidence, by the spread over prompts)" if error < math.inf else ""
    close = [name_of(other.row) for other in others if not _leads(best, other)]
    if not close:
        return [about]
    return [about, f"too close to tell from it: {', '.join(close)}; more prompts would tell (--limit, --prompts)"]


def _leads(best: Choice, other: Choice) -> bool:
    """Whether it is faster by more than chance, prompt by prompt."""
    both = sorted(best.speedups.keys() & other.speedups.keys())
    mean, error = _interval([math.log(best.speedups[unit] / other.speedups[unit]) for unit in both])
    return mean > error


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its confidence interval; one value tells nothing of that."""
    if len(values) < 2:
        return (values[0] if values else 0.0), math.inf
    factor = _T_95[len(values) - 2] if len(values) - 2 < len(_T_95) else _T_95_BEYOND
    return fmean(values), factor * stdev(values) / math.sqrt(len(values))


def print_ranking(ranking: Ranking, reasons: Mapping[str, str], options: TuneOptions) -> None:
    """A table for people; the last line of stdout is the winner as JSON, if the measurement was ended."""
    choices, out = ranking.choices, options.out
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
        for line in confidence(choices, options.repeats):
            screen.print(line, highlight=False, soft_wrap=True)
    if ranking.interrupted:
        screen.print(f"interrupted: this is what was measured until then; {out} was not written", style="yellow")
    elif choices:
        screen.print(f"the winner is in {out}: use it with --speculative-config @{out}", highlight=False)
        print(json.dumps(choices[0].config))


def _show(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"

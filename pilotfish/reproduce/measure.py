"""Measures one pair: alpha on its target's text, then speed, plain decoding and every drafter in turns.

It does not know what the numbers are compared with. The one trick: whatever takes minutes is a value of the record by
itself (sixteen answers for alpha; one temperature for speed), so Ctrl-C loses little.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ..bench.measure import run_bench
from ..bench.options import BenchOptions
from ..bench.results import ALL, Report
from ..drafters import registry
from ..drafters.base import Drafter, Setting
from ..train.progress import Progress
from .alpha import Builders, tally
from .counts import CountDrafter, Counts
from .journal import Journal
from .options import ReproduceOptions
from .pairs import Opened, Pair

TEMPERATURES = (0.0, 1.0)
_PROMPTS = 16  # that are answered as one batch
_KEPT = ("method", "num_speculative_tokens", "tokens_per_second", "speedup", "speedup_spread", "mean_acceptance_length",
         "alpha", "c", "verify_ratio", "pass_ratio", "predicted_speedup_measured_verify", "num_steps",
         "identical")  # fmt: skip
_PLACE = ("cpu", "gpu", "cores", "threads", "platform", "versions", "commit", "date")


class Measuring:
    """One pair's. results: the record. texts: what is expensive to make again and no result."""

    def __init__(self, pair: Pair, opened: Opened, options: ReproduceOptions, results: Journal, texts: Journal):
        self.pair, self.opened, self.options = pair, opened, options
        self.results, self.texts = results, texts

    def alpha(self) -> None:
        """Every drafter's places, batch by batch, until there are ``options.tokens``. At temperature 0 every prompt is
        answered only once, so there may be fewer."""
        for temperature in TEMPERATURES:
            title = f"{self.pair.name}: alpha at temperature {temperature:g}"
            with Progress(title, self.options.tokens) as progress:
                num_places, number = 0, 0
                while num_places < self.options.tokens:
                    prompts = _batch(self.opened.prompts, number, again=temperature > 0)
                    if not prompts:
                        break
                    key = alpha_key(self.pair.key, temperature, number)
                    value = self.results.once(key, partial(self._tallied, prompts, temperature, number))
                    num_places += max(one["num_places"] for one in value.values())
                    number += 1
                    progress.show(min(num_places, self.options.tokens), f"{num_places} tokens")

    def speed(self, work: Path) -> None:
        """Rows of the bench, at both temperatures. Raises KeyboardInterrupt if it was ended before its time."""
        options = self.options
        path = work / f"timed {''.join(c if c.isalnum() else '-' for c in self.pair.key)}.jsonl"
        lines = [json.dumps({"prompt": ids}) for ids in self.opened.prompts[: options.timed_prompts]]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        size = f"{options.timed_prompts} x {options.timed_tokens} x {options.repeats}, K {options.num_drafted}"
        for temperature in TEMPERATURES:
            key = f"{speed_key(self.pair.key, temperature)} | {size}"
            self.results.once(key, partial(_timed, path, self.opened, options, temperature))

    def _tallied(self, prompts: Sequence[list[int]], temperature: float, number: int) -> dict[str, Any]:
        found, _ = tally(
            self.opened.target,
            self._builders,
            prompts,
            temperature=temperature,
            max_tokens=self.pair.max_tokens,
            seed=number,
        )
        return {name: asdict(one) for name, one in found.items()}

    @cached_property
    def _builders(self) -> Builders:
        found: dict[str, Callable[[Setting], Drafter]] = {
            name: registry.parse(config).build for name, config in self.opened.configs.items()
        }
        if self.pair.counts:
            counts = Counts(self._own_texts(), self.opened.target.model.info.vocab_size)
            found["unigram"] = lambda _setting: CountDrafter(counts, 1)
            found["bigram"] = lambda _setting: CountDrafter(counts, 2)
        return found

    def _own_texts(self) -> list[list[int]]:
        """Answers to the other prompts, drawn at temperature 1: as many tokens as alpha is measured on."""
        found: list[list[int]] = []
        number = 0
        with Progress(f"{self.pair.name}: text to count", self.options.tokens) as progress:
            while (num_tokens := sum(map(len, found))) < self.options.tokens:
                progress.show(num_tokens, f"{num_tokens} tokens")
                prompts = _batch(self.opened.others, number, again=True)
                found += self.texts.once(
                    f"texts | {self.pair.key} | {number}", partial(self._answers, prompts, 1_000_000 + number)
                )
                number += 1
        return found

    def _answers(self, prompts: Sequence[list[int]], seed: int) -> list[list[int]]:
        _, written = tally(self.opened.target, {}, prompts, temperature=1.0, max_tokens=self.pair.max_tokens, seed=seed)
        return [list(text.ids) for text in written]


def alpha_key(pair: str, temperature: float, number: int) -> str:
    """Of a batch of places, in the record."""
    return f"alpha | {pair} | T {temperature:g} | {number}"


def speed_key(pair: str, temperature: float) -> str:
    """Of rows of the bench, in the record; how many prompts and repeats follows."""
    return f"speed | {pair} | T {temperature:g}"


def _timed(path: Path, opened: Opened, options: ReproduceOptions, temperature: float) -> dict[str, Any]:
    bench = BenchOptions(
        prompts=str(path),
        repeats=options.repeats,
        max_tokens=options.timed_tokens,
        temperature=temperature,
        num_speculative_tokens=options.num_drafted,
    )
    report = run_bench(bench, opened.target, list(opened.configs.values()))
    if report.environment["interrupted"]:
        raise KeyboardInterrupt
    environment = {name: report.environment[name] for name in _PLACE}  # without folders of this machine
    return {"rows": _named_rows(report, opened.configs), "environment": environment}


def _named_rows(report: Report, configs: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = {config["method"]: name for name, config in configs.items()}
    assert len(names) == len(configs), "the bench tells drafters of one method apart by words that we do not have"
    return [
        {"drafter": names.get(row.method, "none")} | {name: getattr(row, name) for name in _KEPT}
        for row in report.rows
        if row.category == ALL
    ]


def _batch(prompts: Sequence[list[int]], number: int, *, again: bool) -> list[list[int]]:
    """The prompts of a batch; again: from the first one on, when all were met."""
    num_batches = -(-len(prompts) // _PROMPTS)
    if number >= num_batches and not again:
        return []
    start = number % num_batches * _PROMPTS
    return list(prompts[start : start + _PROMPTS])

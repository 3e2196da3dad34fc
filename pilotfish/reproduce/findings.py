"""From the record to rows: alphas, and predictions beside measured speeds. It does not know how they are shown.

The one trick: rows follow from the record alone, so a report can be made anew of what earlier runs measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..decoding.theory import best_num_drafted
from .alpha import Tally
from .journal import Journal
from .measure import TEMPERATURES, alpha_key, speed_key
from .predict import Prediction


@dataclass(frozen=True, slots=True)
class Speed:
    """One drafter at one K and temperature, with what was predicted. spread: 10th to 90th percentile. own_alpha: alpha
    is that of the timed runs, for none was measured on text."""

    drafter: str
    temperature: float
    prediction: Prediction
    spread: tuple[float, float]
    tokens_per_second: float
    own_alpha: bool = False


@dataclass(frozen=True, slots=True)
class Best:
    """A drafter's best K. formula: by alpha and c, of all; measured: of those that were timed, 0 if none pays."""

    drafter: str
    temperature: float
    alpha: float
    c: float
    formula: int
    measured: int
    speedup: float


@dataclass(frozen=True, slots=True)
class Findings:
    """What is known of one pair. kind: see `Pair`. notes: of the training, if it was here. alphas: by temperature."""

    name: str
    kind: str
    notes: Mapping[str, Any]
    alphas: Mapping[float, Mapping[str, Tally]]
    speeds: Sequence[Speed] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def best(self) -> list[Best]:
        """One per drafter and temperature."""
        groups: dict[tuple[str, float], list[Speed]] = {}
        for speed in self.speeds:
            groups.setdefault((speed.drafter, speed.temperature), []).append(speed)
        return [_best(group) for group in groups.values()]


def findings(results: Journal) -> list[Findings]:
    """Every pair in the record, in its order; of runs of different sizes the last one."""
    found: dict[str, Findings] = {}
    for key, about in results.values.items():
        kind, _, pair = key.partition(" | ")
        if kind == "pair":
            alphas = {temperature: _alphas(results, pair, temperature) for temperature in TEMPERATURES}
            speeds, environment = _speeds(results, pair, alphas)
            own = Findings(about["name"], about["kind"], about["notes"], alphas, speeds, environment)
            if own.speeds or any(alphas.values()):
                found[own.name] = own
    return list(found.values())


def _alphas(results: Journal, pair: str, temperature: float) -> dict[str, Tally]:
    """{drafter: all its places}."""
    found: dict[str, Tally] = {}
    number = 0
    while (value := results.values.get(alpha_key(pair, temperature, number))) is not None:
        for name, fields in value.items():
            found.setdefault(name, Tally()).merge(Tally(**fields))
        number += 1
    return found


def _speeds(
    results: Journal, pair: str, alphas: Mapping[float, Mapping[str, Tally]]
) -> tuple[list[Speed], dict[str, Any]]:
    """Of the last timing at each temperature."""
    speeds: list[Speed] = []
    environment: dict[str, Any] = {}
    for temperature in TEMPERATURES:
        own = [value for key, value in results.values.items() if key.startswith(speed_key(pair, temperature) + " | ")]
        if own:
            environment = own[-1]["environment"]
            speeds += [
                _speed(row, temperature, alphas[temperature].get(row["drafter"]))
                for row in own[-1]["rows"]
                if row["drafter"] != "none" and row["c"] is not None
            ]
    return speeds, environment


def _speed(row: Mapping[str, Any], temperature: float, tally: Tally | None) -> Speed:
    num_drafted = row["num_speculative_tokens"]
    tokens, accounted = row["mean_acceptance_length"], row["predicted_speedup_measured_verify"]
    prediction = Prediction(
        num_drafted=num_drafted,
        alpha=row["alpha"] if tally is None else tally.alpha,
        c=row["c"],
        rows=row["verify_ratio"] or row["pass_ratio"],
        tokens=tokens,
        cost=tokens / accounted,
        measured=row["speedup"],
        tokens_of_runs=None if tally is None else tally.expected_tokens(num_drafted),
    )
    low, high = row["speedup_spread"]
    return Speed(row["drafter"], temperature, prediction, (low, high), row["tokens_per_second"], tally is None)


def _best(group: Sequence[Speed]) -> Best:
    first = group[0]
    alpha, c = first.prediction.alpha, sum(one.prediction.c for one in group) / len(group)
    best = max(group, key=lambda one: one.prediction.measured)
    pays = best.prediction.measured > 1
    return Best(
        first.drafter,
        first.temperature,
        alpha,
        c,
        best_num_drafted(alpha, c),
        best.prediction.num_drafted if pays else 0,
        best.prediction.measured if pays else 1.0,
    )

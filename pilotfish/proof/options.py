"""VerifyOptions: how long and how hard to look. Frozen; the command line is generated from the fields."""

import math
from dataclasses import dataclass, field

from ..decoding.draft import MAX_NODES
from ..errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Raises OptionError for values out of range."""

    prompts: str | None = field(default=None, metadata={"help": "JSONL with turns or prompt; our own few if unset"})
    limit: int = field(default=4, metadata={"help": "at most this many prompts"})
    max_tokens: int = field(default=48, metadata={"help": "tokens a prompt that are compared one by one"})
    temperature: tuple[float, ...] = field(default=(0.0, 1.0), metadata={"help": "compare at this temperature"})
    concurrency: int = field(default=8, metadata={"help": "prompts that run as one batch where texts are compared"})
    texts_only: bool = field(default=False, metadata={"help": "compare texts, many perhaps, and leave out the laws"})
    draws: int = field(default=3000, metadata={"help": "draws of each chi-square test"})
    num_drafted: int = field(default=2, metadata={"help": "drafted tokens a step in the chi-square tests"})
    candidates: int = field(default=8, metadata={"help": "top_k of the chi-square tests; more need more draws"})
    seed: int = field(default=0, metadata={"help": "fixes every draw of the proof"})

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", tuple(self.temperature))  # the only place: normalises a list
        for name in ("limit", "max_tokens", "concurrency", "draws"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        _require(1 <= self.num_drafted <= MAX_NODES, "num_drafted", self.num_drafted, f"from 1 to {MAX_NODES}")
        _require(self.candidates >= 2, "candidates", self.candidates, "2 or more")
        _require(self.seed >= 0, "seed", self.seed, "0 or more")
        _require(len(self.temperature) > 0, "temperature", self.temperature, "given at least once")
        for value in self.temperature:
            _require(value >= 0 and math.isfinite(value), "temperature", value, "0 (greedy) or more")


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise OptionError(f"{name} must be {wanted}, not {value!r}")

"""What a trial of the server can be asked for. Frozen; the command line is generated from the fields."""

import json
from dataclasses import dataclass, field
from typing import Any

from ...errors import OptionError

TRIALS = ("load", "vanish", "stubborn", "overhead")
_DEFAULT = (
    '{"model": "demo", "quantization": "int8", "method": "suffix", "num_pages": 512, '
    '"suffix_decoding_max_cached_tokens": 8192}'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """Raises OptionError for values out of range."""

    trials: str = field(default="load,vanish,stubborn,overhead", metadata={"help": "which, with commas between them"})
    llm: str = field(
        default=_DEFAULT,
        metadata={"help": "arguments of LLM, a JSON object; memory is flat once all answers fit that are remembered"},
    )
    prompts: str | None = field(default=None, metadata={"help": "JSONL with turns or prompt; our own few if unset"})
    streams: int = field(default=16, metadata={"help": "load: streams at the same time"})
    seconds: float = field(default=600.0, metadata={"help": "load: how long, the warm-up not counted"})
    warmup: float = field(default=120.0, metadata={"help": "load: seconds before memory is compared"})
    max_tokens: int = field(default=64, metadata={"help": "tokens of each answer"})
    connects: int = field(default=1000, metadata={"help": "vanish: how many clients hang up"})
    rounds: int = field(default=5, metadata={"help": "overhead: how often each side is measured"})
    concurrency: str = field(default="1,8", metadata={"help": "overhead: streams at the same time"})

    def __post_init__(self) -> None:
        for name in ("streams", "max_tokens", "connects", "rounds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{name} must be a whole number, 1 or more, not {value!r}")
        for name in ("seconds", "warmup"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise OptionError(f"{name} must be a number, 0 or more, not {getattr(self, name)!r}")
        for word in self.chosen:
            if word not in TRIALS:
                raise OptionError(f"trials must be of {', '.join(TRIALS)}, not {word!r}")
        self.arguments, self.widths  # noqa: B018 -- raise if they cannot be read

    @property
    def chosen(self) -> list[str]:
        """The names of the trials."""
        return [word.strip() for word in self.trials.split(",")]

    @property
    def widths(self) -> list[int]:
        """The values of concurrency."""
        words = [word.strip() for word in self.concurrency.split(",")]
        if not all(word.isascii() and word.isdigit() and int(word) for word in words):
            raise OptionError(f"concurrency must be numbers, 1 or more, with commas between them: {self.concurrency!r}")
        return [int(word) for word in words]

    @property
    def arguments(self) -> dict[str, Any]:
        """Of LLM."""
        try:
            found = json.loads(self.llm)
        except ValueError as error:
            raise OptionError(f"llm is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise OptionError(f"llm must be a JSON object, not {self.llm}")
        return found

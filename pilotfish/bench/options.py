"""What bench and tune can be asked for. Frozen; the command line is generated from the fields."""

from dataclasses import asdict, dataclass, field
from typing import Literal

from ..decoding.draft import MAX_NODES
from ..errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Raises OptionError for values out of range."""

    prompts: str | None = field(default=None, metadata={"help": "JSONL with turns or prompt; our own few if unset"})
    limit: int | None = field(default=None, metadata={"help": "take this many prompts, spread over the categories"})
    repeats: int = field(default=3, metadata={"help": "how often each prompt is measured with each method"})
    concurrency: int = field(default=1, metadata={"help": "prompts of one category that run as one batch"})
    max_tokens: int = field(default=96, metadata={"help": "new tokens per prompt"})
    temperature: float = field(default=0.0, metadata={"help": "0 is greedy"})
    seed: int | None = field(
        default=None, metadata={"help": "fixes sampled texts, so that they can be compared with plain decoding's"}
    )
    num_speculative_tokens: str | None = field(
        default=None, metadata={"help": "K, or several as 2,4,8,auto, each measured; the methods' own if unset"}
    )
    ignore_eos: bool = field(default=False, metadata={"help": "go on after the end of text, for equal lengths"})
    profile: bool = field(default=False, metadata={"help": "also show where each millisecond of a step goes"})
    plot: str | None = field(default=None, metadata={"help": "also draw the results into this PNG file"})
    trace: str | None = field(
        default=None, metadata={"help": "then run each prompt once more, and write each pass into this JSONL file"}
    )

    def __post_init__(self) -> None:
        for name in ("limit", "repeats", "concurrency", "max_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise OptionError(f"{name} must be a whole number, 1 or more, not {value!r}")
        if self.max_tokens < 2:
            raise OptionError("max_tokens must be 2 or more: decoding is timed from the first token to the last")
        self.num_drafted  # noqa: B018 -- raises if it cannot be read

    @property
    def num_drafted(self) -> tuple[int | Literal["auto"], ...]:
        """The values of K to measure, in the order given; empty: each method's own."""
        if self.num_speculative_tokens is None:
            return ()
        values = [_num_drafted(part.strip()) for part in str(self.num_speculative_tokens).split(",")]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            raise OptionError(
                f"num_speculative_tokens must be numbers from 0 to {MAX_NODES}, or auto, with commas between them, "
                f"not {self.num_speculative_tokens!r}"
            )
        return tuple(dict.fromkeys(known))

    @property
    def comparable(self) -> bool:
        """Whether a method's text must be plain decoding's own, token by token."""
        return self.temperature == 0 or self.seed is not None


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
    own_tokens: int = field(
        default=0, metadata={"help": "with a draft model: draw so many more tokens, to count which are frequent"}
    )

    def __post_init__(self) -> None:
        if isinstance(self.own_tokens, bool) or not isinstance(self.own_tokens, int) or self.own_tokens < 0:
            raise OptionError(f"own_tokens must be a whole number, 0 or more, not {self.own_tokens!r}")

    def bench(self) -> BenchOptions:
        """What to ask of the bench."""
        values = asdict(self)
        del values["out"], values["own_tokens"]
        return BenchOptions(**values)


def _num_drafted(text: str) -> int | Literal["auto"] | None:
    if text == "auto":
        return "auto"
    return int(text) if text.isascii() and text.isdigit() and int(text) <= MAX_NODES else None

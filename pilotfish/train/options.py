"""What training can be asked for. Frozen; the command line is generated from the fields.

`DATA_FIELDS` say which text a run collects, `HEAD_FIELDS` what it makes of it; the rest may change from one start to
the next of the same run.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ..errors import OptionError

Loss = Literal["kl", "ce", "tv", "hybrid"]
_LOSSES = ("kl", "ce", "tv", "hybrid")
_PRECISIONS = ("auto", "float32", "bfloat16")

# What a checkpoint must agree with before it is gone on with.
HEAD_FIELDS = (
    "loss", "epochs", "batch_tokens", "learning_rate", "warmup", "weight_decay", "clip", "draft_vocab_size",
    "max_length", "holdout", "seed", "decay", "unroll", "num_heads", "taps",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What both kinds of head have. Raises OptionError for values out of range.

    out: the folder of texts, checkpoints and the finished head; starting again with it goes on where it stopped.
    """

    out: str = field(metadata={"help": "folder for texts, checkpoints and the head; a second start goes on there"})
    prompts: str | None = field(
        default=None, metadata={"help": "JSONL with turns or prompt; the target's own if unset"}
    )
    seed_text: str | None = field(
        default=None, metadata={"help": "folder of plain text that leads the target to passages and topics"}
    )
    num_tokens: int = field(default=1_000_000, metadata={"help": "answer tokens to collect"})
    max_length: int = field(default=1024, metadata={"help": "longest text, prompt and answer, in tokens"})
    collect_batch: int = field(default=48, metadata={"help": "texts that are collected at once"})
    holdout: float = field(default=0.02, metadata={"help": "share of the prompts that is kept for judging"})
    draft_vocab_size: int = field(default=16_384, metadata={"help": "tokens the head can guess: the most frequent"})
    loss: Loss = field(
        default="kl",
        metadata={
            "help": "kl: the target's law; ce: the text's token; tv: the acceptance itself; hybrid: from kl to tv"
        },
    )
    epochs: int = field(default=2, metadata={"help": "how often each text is met"})
    batch_tokens: int = field(default=2048, metadata={"help": "tokens of one step"})
    learning_rate: float = field(default=1e-3, metadata={"help": "the largest, after warming up"})
    warmup: float = field(default=0.03, metadata={"help": "share of the steps in which the rate rises"})
    weight_decay: float = field(default=0.01, metadata={"help": "of matrices, per step times rate"})
    clip: float = field(default=1.0, metadata={"help": "largest norm of a step's gradient"})
    precision: Literal["auto", "float32", "bfloat16"] = field(
        default="auto", metadata={"help": "of the products; auto takes bfloat16 where it is fast"}
    )
    state_cache: float = field(
        default=8.0, metadata={"help": "GiB of disk for the target's states between epochs; 0 recomputes them"}
    )
    checkpoint_seconds: float = field(default=60.0, metadata={"help": "between checkpoints"})
    seed: int = field(default=0, metadata={"help": "of prompts, order and weights"})
    bench_limit: int = field(default=12, metadata={"help": "held-out prompts in the closing bench; 0 leaves it out"})

    def __post_init__(self) -> None:
        _whole(self, 1, "num_tokens", "collect_batch", "draft_vocab_size", "epochs", "batch_tokens")
        _whole(self, 0, "bench_limit", "seed")
        _whole(self, 16, "max_length")
        _number(self, "learning_rate", "clip", "checkpoint_seconds", above=0)
        _number(self, "weight_decay", "state_cache", least=0)
        _number(self, "holdout", "warmup", least=0, below=1)
        for name, known in (("loss", _LOSSES), ("precision", _PRECISIONS)):
            if getattr(self, name) not in known:
                raise OptionError(f"{name} must be {', '.join(known)}, not {getattr(self, name)!r}")

    def identity(self) -> dict[str, Any]:
        """What decides the head's weights, by name."""
        names = {spec.name for spec in fields(self)}
        return {name: _plain(getattr(self, name)) for name in HEAD_FIELDS if name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Options(TrainOptions):
    """unroll: steps of training-time test (Li et al., 2025, EAGLE-3, section 3.2): the head is fed its own states that
    often, as it is when it drafts. The first half of the steps unroll once only."""

    unroll: int = field(default=3, metadata={"help": "steps in which the head is fed its own states"})
    decay: float = field(default=0.8, metadata={"help": "weight of each unrolled step relative to the one before"})
    taps: tuple[int, ...] | None = field(
        default=None, metadata={"help": "three layers whose states are read; spread out if unset"}
    )

    def __post_init__(self) -> None:
        TrainOptions.__post_init__(self)  # super() does not work in a class with slots
        _whole(self, 1, "unroll")
        _number(self, "decay", above=0)
        if self.taps is not None and len(self.taps) != 3:
            raise OptionError(f"taps must be three layers, not {self.taps!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaOptions(TrainOptions):
    """Heads as in Cai et al., 2024 (Medusa-1): the target stays as it is."""

    num_heads: int = field(default=4, metadata={"help": "how many tokens ahead are guessed"})
    decay: float = field(default=0.8, metadata={"help": "weight of each head relative to the one before"})
    epochs: int = field(default=1, metadata={"help": "how often each text is met"})

    def __post_init__(self) -> None:
        TrainOptions.__post_init__(self)
        _whole(self, 1, "num_heads")
        _number(self, "decay", above=0)


def _whole(options: TrainOptions, least: int, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise OptionError(f"{name} must be a whole number, {least} or more, not {value!r}")


def _number(
    options: TrainOptions, *names: str, least: float = 0, above: float | None = None, below: float | None = None
) -> None:
    for name in names:
        value = getattr(options, name)
        fine = isinstance(value, int | float) and not isinstance(value, bool) and least <= value < float("inf")
        fine = fine and (above is None or value > above) and (below is None or value < below)
        if not fine:
            bounds = [f"{least} or more" if above is None else f"above {above}"]
            bounds += [f"below {below}"] if below is not None else []
            raise OptionError(f"{name} must be a number {' and '.join(bounds)}, not {value!r}")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value

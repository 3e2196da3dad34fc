"""What the report can be asked for. Frozen; the command line is generated from the fields."""

from dataclasses import dataclass, field
from typing import Literal

from ..decoding.draft import MAX_NODES
from ..errors import OptionError, unknown_name

PARTS = ("alpha", "speed", "g2p", "figures")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproduceOptions:
    """Raises OptionError for values out of range."""

    out: str = field(default="reproduction", metadata={"help": "folder of the report and of what was measured"})
    only: str | None = field(
        default=None, metadata={"help": f"some of the parts, as alpha,speed: {', '.join(PARTS)}; all if unset"}
    )
    model: str | None = field(
        default=None, metadata={"help": "with --draft-model, one more pair: the target's folder or hub id"}
    )
    draft_model: str | None = field(default=None, metadata={"help": "folder or hub id of that pair's draft model"})
    quantization: Literal["auto", "none", "int8", "int4"] = field(
        default="auto", metadata={"help": "weights of language models; auto: int8 on a CPU, as stored elsewhere"}
    )
    prompts: str | None = field(
        default=None, metadata={"help": "JSONL with turns or prompt; prompts that the target writes itself if unset"}
    )
    tokens: int = field(default=10_000, metadata={"help": "tokens of the target's text that each alpha is a mean over"})
    num_drafted: str = field(default="1,3,5", metadata={"help": "values of K to time"})
    timed_prompts: int = field(default=8, metadata={"help": "prompts that are timed"})
    timed_tokens: int = field(default=64, metadata={"help": "new tokens of each, at most"})
    repeats: int = field(default=3, metadata={"help": "how often each prompt is timed with each way to draft"})
    work: str | None = field(
        default=None, metadata={"help": "folder of the trained pair, of prompts and texts; the cache folder if unset"}
    )

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("timed_prompts", 1), ("timed_tokens", 2), ("repeats", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OptionError(f"{name} must be a whole number, {least} or more, not {value!r}")
        if (self.model is None) != (self.draft_model is None):
            raise OptionError("model and draft_model make a pair: give both, or none")
        if self.quantization not in ("auto", "none", "int8", "int4"):
            raise OptionError(f"quantization must be auto, none, int8 or int4, not {self.quantization!r}")
        self.parts  # noqa: B018 -- raises for an unknown one
        self.drafted  # noqa: B018

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts to do."""
        if self.only is None:
            return PARTS
        names = [name.strip() for name in self.only.split(",")]
        for name in names:
            if name not in PARTS:
                raise unknown_name("part", name, PARTS)
        return tuple(names)

    @property
    def drafted(self) -> tuple[int, ...]:
        """The values of K."""
        parts = [part.strip() for part in self.num_drafted.split(",")]
        if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= MAX_NODES for part in parts):
            raise OptionError(
                f"num_drafted must be numbers from 1 to {MAX_NODES}, with commas between them, not {self.num_drafted!r}"
            )
        return tuple(dict.fromkeys(int(part) for part in parts))

"""EngineOptions: bounds of one engine, in vLLM's words. Frozen; the command line is generated from the fields."""

from dataclasses import dataclass, field, fields

from ..errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Raises OptionError for values out of range."""

    max_model_len: int | None = field(default=None, metadata={"help": "longest text; the model's own if unset"})
    max_num_seqs: int = field(default=16, metadata={"help": "requests that run at once"})
    max_num_batched_tokens: int = field(default=2048, metadata={"help": "rows of one pass; prompts go in chunks"})
    block_size: int = field(default=16, metadata={"help": "tokens of one page"})
    num_pages: int | None = field(default=None, metadata={"help": "pages of the pool; sized by memory if unset"})
    kv_cache_memory: float = field(default=2.0, metadata={"help": "GiB for the pool if num_pages is unset"})
    enable_prefix_caching: bool = field(default=True, metadata={"help": "share pages of equal beginnings"})

    def __post_init__(self) -> None:
        if not isinstance(self.enable_prefix_caching, bool):
            raise OptionError(f"enable_prefix_caching must be True or False, not {self.enable_prefix_caching!r}")
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name == "enable_prefix_caching" or (value is None and spec.default is None):
                continue
            kind = (int, float) if spec.name == "kv_cache_memory" else int
            if isinstance(value, bool) or not isinstance(value, kind):
                wanted = "a number" if spec.name == "kv_cache_memory" else "a whole number"
                raise OptionError(f"{spec.name} must be {wanted}, not {value!r}")
            if not value > 0:
                raise OptionError(f"{spec.name} must be above 0, not {value!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise OptionError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every request needs one row a pass"
            )

"""What a run over several engines can be asked for. Frozen; the command line is generated from the fields."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...drafters import registry
from ...errors import OptionError
from ...flags import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersOptions:
    """Raises OptionError for values out of range."""

    model: str = field(default="demo", metadata={"help": "folder or hub id of the target, or demo"})
    draft_model: str | None = field(default=None, metadata={"help": "folder or hub id of the draft model"})
    gguf: str | None = field(default=None, metadata={"help": "the target as a GGUF file: llama.cpp, weights gguf"})
    prompts: str | None = field(default=None, metadata={"help": "JSONL with turns or prompt; our own few if unset"})
    limit: int | None = field(default=None, metadata={"help": "take this many prompts, spread over the categories"})
    max_tokens: int = field(default=96, metadata={"help": "new tokens per prompt"})
    engines: tuple[str, ...] = field(default=(), metadata={"help": "engines to run; all if unset", "flag": "engine"})
    quantization: tuple[str, ...] = field(
        default=("int8",), metadata={"help": "pilotfish's weights: int8, int4, gguf (that file's own), none"}
    )
    speculative_config: tuple[str, ...] = field(
        default=(), metadata={"help": "pilotfish's drafting, as JSON or @FILE; suffix and draft_model if unset"}
    )
    threads: int | None = field(default=None, metadata={"help": "threads of each engine; all usable cores if unset"})
    memory_gb: float | None = field(
        default=None,
        metadata={"help": "engines loaded at once may need this much; four fifths of what is free if unset"},
    )
    timeout: float = field(default=1200.0, metadata={"help": "seconds after which an engine that is silent has failed"})
    environments: str | None = field(
        default=None, metadata={"help": "folder for the engines' environments and converted models; the cache if unset"}
    )
    pip_flags: str = field(default="", metadata={"help": "handed to pip when an engine is installed"})
    out: str = field(default="peers.json", metadata={"help": "results; beside it FILE.jsonl, each run as it is made"})
    plot: str | None = field(default=None, metadata={"help": "also draw the results into this PNG file"})
    fresh: bool = field(default=False, metadata={"help": "begin anew instead of going on with the runs in FILE.jsonl"})

    def __post_init__(self) -> None:
        for name, least in (("limit", 1), ("max_tokens", 2), ("threads", 1)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise OptionError(f"{name} must be a whole number, {least} or more, not {value!r}")
        for name in ("memory_gb", "timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise OptionError(f"{name} must be more than 0, not {value!r}")
        for weights in self.quantization:
            if weights not in ("int8", "int4", "gguf", "none"):
                raise OptionError(f"quantization must be int8, int4, gguf or none, not {weights!r}")
        if Path(self.out).suffix == ".jsonl":
            raise OptionError(f"out must not end in .jsonl, not {self.out!r}: that file is written beside it")
        if not Path(self.out).expanduser().absolute().parent.is_dir():
            raise OptionError(f"out: there is no folder {Path(self.out).expanduser().absolute().parent}")
        self.configs  # noqa: B018 -- raises if one cannot be read

    @property
    def configs(self) -> dict[str, dict[str, Any]]:
        """{what a variant of pilotfish is called: its speculative config}, without plain decoding."""
        if self.speculative_config:
            given = [read_json(text) for text in self.speculative_config]
            for config in given:
                registry.parse(config)  # raises for what is misspelt, before engines are prepared
        else:
            given = [{"method": "suffix", "num_speculative_tokens": "auto"}]
            if self.draft_model is not None:
                given.append({"method": "draft_model", "num_speculative_tokens": "auto"})
        named: dict[str, dict[str, Any]] = {}
        for config in given:
            name = f"{config.get('method', 'draft_model')} {config.get('num_speculative_tokens', 'auto')}"
            if name in named:
                name += f" {len(named) + 1}"
            named[name] = config
        return named

    @property
    def num_threads(self) -> int:
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.threads or usable

    @property
    def journal(self) -> Path:
        return Path(self.out).expanduser().with_suffix(".jsonl")

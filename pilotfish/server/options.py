"""ServeOptions: where the server listens and what it bounds; BatchOptions: what a batch is called and bounded by.

Both are frozen; the command line is generated from the fields.

It does not know the server. The one trick: every bound has a default that a stranger's request cannot hurt.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Literal

from ..errors import OptionError

Granularity = Literal["run", "token"]
_LARGEST_PORT = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Raises OptionError for values out of range."""

    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on; the default is this machine only"})
    port: int = field(default=8000, metadata={"help": "port to listen on; 0 takes a free one"})
    api_key: str | None = field(
        default=None, metadata={"help": "what clients must send; safer in the environment: PILOTFISH_API_KEY"}
    )
    protect_metrics: bool = field(default=False, metadata={"help": "ask for the key at /metrics too"})
    served_model_name: str | None = field(
        default=None, metadata={"help": "what clients call the model; as given with --model if unset"}
    )
    max_queue: int = field(default=64, metadata={"help": "completions that may wait for a seat; more answer 429"})
    max_n: int = field(default=16, metadata={"help": "completions of one request: prompts times n"})
    max_completion_tokens: int | None = field(
        default=None, metadata={"help": "longest answer a request may ask for; the context if unset"}
    )
    max_body_size: int = field(default=4 * 2**20, metadata={"help": "bytes of a request; more answer 413"})
    max_connections: int = field(default=1024, metadata={"help": "open connections; more answer 503"})
    request_timeout: float = field(default=600.0, metadata={"help": "seconds until a request is given up"})
    read_timeout: float = field(default=30.0, metadata={"help": "seconds a client may take to send its request"})
    drain_timeout: float = field(
        default=60.0, metadata={"help": "seconds that running requests get to end after SIGTERM or Ctrl-C"}
    )
    stream_granularity: Granularity = field(
        default="run", metadata={"help": "a piece of a stream is all tokens of a pass, or one token"}
    )
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = field(
        default="summary", metadata={"help": "what answers say of drafting; detailed lists every pass"}
    )
    trace: str | None = field(
        default=None, metadata={"help": "also append a record of each pass to this JSONL file; it holds what was said"}
    )
    access_log: bool = field(default=False, metadata={"help": "a line per request, never with its text"})

    def __post_init__(self) -> None:
        for name in ("max_queue", "max_n", "max_body_size", "max_connections", "port", "max_completion_tokens"):
            least = 0 if name in ("port", "max_queue") else 1
            value = getattr(self, name)
            if value is None and name == "max_completion_tokens":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OptionError(f"{name} must be a whole number, {least} or more, not {value!r}")
        if self.port > _LARGEST_PORT:
            raise OptionError(f"port must be at most {_LARGEST_PORT}, not {self.port}")
        for name in ("request_timeout", "read_timeout", "drain_timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise OptionError(f"{name} must be a number above 0, not {value!r}")
        for name in ("host", "api_key", "served_model_name", "trace"):
            if not isinstance(getattr(self, name), str if name == "host" else str | None):
                raise OptionError(f"{name} must be a text, not {getattr(self, name)!r}")
            if getattr(self, name) == "":
                raise OptionError(f"{name} is empty: leave it out or give one")
        words = {"stream_granularity": ("run", "token"), "per_request_spec_decode_metrics": _METRICS}
        for name, known in words.items():
            if getattr(self, name) not in known:
                raise OptionError(f"{name} must be {', '.join(known)}, not {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Of `pilotfish batch`. Raises OptionError for values out of range."""

    served_model_name: str | None = field(
        default=None, metadata={"help": "what the lines call the model; as given with --model if unset"}
    )
    max_completion_tokens: int | None = field(
        default=None, metadata={"help": "longest answer a line may ask for; the context if unset"}
    )
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = field(
        default="summary", metadata={"help": "what answers say of drafting; detailed lists every pass"}
    )

    def __post_init__(self) -> None:
        self.serving()

    def serving(self) -> ServeOptions:
        """The server's options: nobody waits at the other end, so nothing is turned away or given up."""
        return ServeOptions(
            served_model_name=self.served_model_name,
            max_completion_tokens=self.max_completion_tokens,
            per_request_spec_decode_metrics=self.per_request_spec_decode_metrics,
            max_queue=1_000_000,
            max_n=128,
            request_timeout=1e9,
        )


_METRICS = ("none", "summary", "detailed")
NAMES = frozenset(spec.name for spec in fields(ServeOptions))

"""What clients may ask: OpenAI's and vLLM's fields, each one either honoured, or harmless, or refused by name.

It does not know the model or HTTP. The one trick: pydantic checks types and ranges and writes the OpenAPI document
from the same classes, and two tables say what becomes of every other field that clients are known to send. A name
that is in neither is a spelling mistake: the answer names the nearest one.

    HARMLESS   accepted and not looked at: nothing in the text depends on it
    NEUTRAL    not served here; accepted only at the value that means "off", because anything else would change the text
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, ValidationError
from pydantic_core import from_json

from ..decoding.grammar import StructuredOutputsParams
from ..decoding.sampling import SamplingParams
from ..errors import unknown_name
from .messages import Content, Message
from .options import Granularity
from .refusals import Json, Refusal
from .structured import Strict, Structured
from .tools import CLOSE, MOST_TOOLS, Chosen, Tool, call_grammar

MOST_STOPS = 16
LONGEST_STOP = 256  # characters
MOST_BIASES = 1024
MOST_TOP = 20
_BIG = 2**63 - 1

HARMLESS = frozenset((
    "cache_salt", "include_reasoning", "metadata", "parallel_tool_calls", "priority", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "request_id", "safety_identifier", "service_tier", "store",
    "user",
))  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_decoding_backend": (),
    "length_penalty": (1.0,),
    "modalities": (["text"],),
    "moderation": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}

Whole = Annotated[int, Field(ge=-(2**63), le=_BIG)]
Count = Annotated[int, Field(ge=1, le=_BIG)]
TokenId = Annotated[int, Field(ge=0, le=2**31)]
# The longest lists: of a million faults one is enough to hear of.
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class Prediction(Strict):
    """OpenAI's predicted outputs: text that the answer will resemble, for drafters that copy."""

    type: Literal["content"]
    content: Content


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class Extras(Strict):
    """What no other server has. trace: each piece of a stream tells of its pass (`pilotfish.server.passes`)."""

    trace: bool | None = None


class Sampling(Structured):
    """What both kinds of completion have in common. A null means: not given."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_BIG)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MOST_BIASES)] | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_BIG)] | None = None
    n: Count | None = None
    seed: Whole | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_BIASES)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prediction: Prediction | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_granularity: Granularity | None = None
    pilotfish: Extras | None = None

    _COPIED: ClassVar = (
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "min_tokens", "n", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    )  # fmt: skip

    @classmethod
    def read(cls, body: Any) -> Self:
        """From parsed JSON. Raises Refusal with status 400, naming the field."""
        known = {}
        for name, value in _fields(body).items():
            if name in cls.model_fields:
                known[name] = value
            elif name not in HARMLESS:
                _check_neutral(name, value, cls)
        try:
            return cls.model_validate(known)
        except ValidationError as error:
            raise _plainly(error) from None

    @property
    def num_top(self) -> int | None:
        """How many likeliest tokens to list with each; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer, if the client gave it."""
        return self.max_tokens

    @property
    def traced(self) -> bool:
        """Whether a stream tells of its passes. Raises Refusal if there is no stream."""
        asked = bool(self.pilotfish and self.pilotfish.trace)
        if asked and not self.stream:
            raise Refusal(400, "pilotfish.trace needs stream: true", param="pilotfish")
        return asked

    @property
    def ends_with_usage(self) -> bool:
        """Whether a stream ends with a chunk about usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def counts_usage(self) -> bool:
        """Whether each chunk of such a stream tells of usage so far."""
        return self.ends_with_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def params(self, max_tokens: int) -> SamplingParams:
        """Raises OptionError for a combination that makes no sense, Refusal for a bias of something that is no id."""
        wish = self.wish()
        given = {name: value for name in self._COPIED if (value := getattr(self, name)) is not None}
        bias = {_token_id(token): value for token, value in (self.logit_bias or {}).items()}
        return SamplingParams(
            **given,
            max_tokens=max_tokens,
            logit_bias=bias or None,
            structured_outputs=wish and wish[1],
            logprobs=self.num_top,
            logprobs_mode="raw_logprobs",
        )


class Chat(Sampling):
    """``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Chosen | None = None
    parallel_tool_calls: bool | None = None

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools or []

    def wish(self) -> tuple[str, StructuredOutputsParams] | None:
        """As `Structured.wish`; a call that the client insists on is a form too."""
        form, choice = super().wish(), self.tool_choice
        if not self.offered:
            if not self.tools and choice not in (None, "none", "auto"):
                raise Refusal(400, "tool_choice: there are no tools to choose from", param="tool_choice")
            return form
        if form is not None:
            message = f"{form[0]} and tools: an answer cannot be both; send tool_choice: none, or leave one of them out"
            raise Refusal(400, message, param=form[0])
        if choice in (None, "auto"):
            return None
        if choice == "required":
            return "tools", call_grammar(self.offered, several=self.parallel_tool_calls is not False)
        assert isinstance(choice, Chosen)
        names = [tool.function.name for tool in self.offered]
        if choice.function.name not in names:
            raise Refusal(400, str(unknown_name("tool", choice.function.name, names)), param="tool_choice")
        return "tools", call_grammar([self.offered[names.index(choice.function.name)]], several=False)

    def params(self, max_tokens: int) -> SamplingParams:
        params = super().params(max_tokens)
        if self.offered and self.parallel_tool_calls is False:  # then the first call is the last word
            params = replace(params, stop=(*params.stop, CLOSE))
        return params

    @property
    def num_top(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise Refusal(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise Refusal(400, "max_tokens and max_completion_tokens differ: give one", param="max_tokens")
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class Text(Sampling):
    """``/v1/completions``. prompt: a text, texts, token ids, or lists of them."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1, fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None

    DEFAULT_LIMIT: ClassVar[int] = 16  # OpenAI's

    @property
    def num_top(self) -> int | None:
        return self.logprobs

    @property
    def limit(self) -> int | None:
        return self.DEFAULT_LIMIT if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        several: Any = self.prompt
        return several if isinstance(several, list) and not isinstance(several[0], int) else [several]


_EITHER = [  # what `Tokenize.read` checks
    {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
    {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}},
]


class Tokenize(Strict):
    """``/tokenize``, vLLM's: a prompt or a conversation."""

    model_config = ConfigDict(json_schema_extra={"oneOf": _EITHER})  # type: ignore[dict-item]

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None

    @classmethod
    def read(cls, body: Any) -> Self:
        """As `Sampling.read`."""
        for name in _fields(body):
            if name not in cls.model_fields:
                raise Refusal(400, str(unknown_name("field", name, cls.model_fields)), param=name)
        try:
            asked = cls.model_validate(body)
        except ValidationError as error:
            raise _plainly(error) from None
        if (asked.prompt is None) == (asked.messages is None):
            raise Refusal(400, "give either prompt or messages", param="prompt")
        return asked


def parse(body: bytes) -> Any:
    """JSON. Raises Refusal with status 400 for anything that is not: NaN, bad UTF-8 and half surrogates too."""
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {error}", code="invalid_json") from None


def _fields(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise Refusal(400, f"the body must be a JSON object, not {_short(body)}")
    return body


def _check_neutral(name: str, value: Any, kind: type[Sampling]) -> None:
    if name not in NEUTRAL:
        known = {*kind.model_fields, *HARMLESS, *NEUTRAL}
        raise Refusal(400, str(unknown_name("field", name, known)), param=name, code="unknown_parameter")
    # 1 == True in Python, and not in JSON.
    if value is not None and not any(value == off and type(value) is type(off) for off in NEUTRAL[name]):
        off = " or ".join(["null", *map(repr, NEUTRAL[name])])
        message = f"{name} is not served here, and would change the text: leave it out (or send {off})"
        raise Refusal(400, message, param=name, code="unsupported_parameter")


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise Refusal(400, f"logit_bias must map token ids to numbers, and {_short(text)} is no id", param="logit_bias")
    return int(text)


def _plainly(error: ValidationError) -> Refusal:
    """What is wrong, with its place: ``messages.0.content: ...``. Of a union's arms, which all complain, the one that
    got furthest into the value knows best what was meant."""
    errors = error.errors(include_url=False, include_context=False)
    name = errors[0]["loc"][:1]
    arms: dict[tuple[int | str, ...], list[Any]] = {}
    for one in errors:
        if one["loc"][:1] == name:
            arms.setdefault(tuple(part for part in one["loc"] if _is_arm(part)), []).append(one)
    arm = min(arms.values(), key=lambda arm: (-max(map(_depth, arm)), arm[0]["type"].endswith("_type"), -_reach(arm)))
    first = max(arm, key=_depth)
    place = ".".join(str(part) for part in first["loc"] if not _is_arm(part))
    if first["type"] == "extra_forbidden":
        return Refusal(400, f"{place}: unknown field", param=place)
    told = first["type"] in ("missing", "too_short", "too_long")
    found = "" if told else f", not {_short(first['input'])}"
    return Refusal(400, f"{place}: {first['msg'][:1].lower()}{first['msg'][1:]}{found}", param=place)


def _is_arm(part: int | str) -> bool:
    """Whether this part of a place is pydantic's name for an arm of a union."""
    return isinstance(part, str) and (part in ("str", "int", "bool", "Chosen") or not part.isidentifier())


def _depth(error: Any) -> int:
    return sum(not _is_arm(part) for part in error["loc"])


def _reach(arm: Sequence[Any]) -> int:
    return max(sum(part for part in error["loc"] if isinstance(part, int)) for error in arm)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def schemas() -> dict[str, Json]:
    """The JSON schemas of the bodies, by name, as OpenAPI wants them."""
    found: dict[str, Json] = {}
    for kind in (Chat, Text, Tokenize):
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        found |= schema.pop("$defs", {})
        if kind is not Tokenize:
            harmless = {name: {"description": "accepted; nothing depends on it"} for name in sorted(HARMLESS)}
            schema["properties"] = harmless | schema["properties"]
        found[kind.__name__] = schema
    return found

"""From deltas to OpenAI's JSON: whole answers and the chunks of streams, for chats and for plain completions.

It does not know HTTP or the engine. The one trick: an `Answer` takes the same deltas in both cases, so a stream that is
put together again is the whole answer. What is to be read out of a chat's text (tool calls, say) belongs into
`ChatAnswer.chunk` and `ChatAnswer.choice`, and nowhere else.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from ..decoding.request import FinishReason, SpeculationStats, TokenLogprob
from ..models.words import Spelling
from .engine_thread import Delta
from .passes import block
from .refusals import Json
from .tools import CallReader, joined

_LEAST_LOGPROB = -9999.0  # JSON has no -inf; vLLM's value
_DETAILS = ("per_step_accepted", "per_step_drafted")


@dataclass(slots=True)
class _Choice:
    """What there is of one completion by now."""

    text: str = ""
    num_tokens: int = 0
    logprobs: list[Any] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class _Read:
    """What was read out of one completion's text, where calls are looked for."""

    reader: CallReader = field(default_factory=CallReader)
    content: str = ""
    calls: list[Json] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Style:
    """How the client wants it. logprobs: whether it asked for any; one_by_one: a chunk per token; usage: whether a
    stream ends with a chunk about it; usage_so_far: whether the others tell of it too; metrics: what is said of
    drafting; calls: whether tool calls are read out of a chat's text."""

    logprobs: bool = False
    one_by_one: bool = False
    usage: bool = False
    usage_so_far: bool = False
    metrics: Literal["none", "summary", "detailed"] = "summary"
    calls: bool = False


class Answer(ABC):
    """One HTTP request's answer in the making. num_prompt_tokens: of all its prompts."""

    KIND: ClassVar[str]
    CHUNK_KIND: ClassVar[str]
    PREFIX: ClassVar[str]

    def __init__(self, model: str, num_choices: int, num_prompt_tokens: int, spelling: Spelling, style: Style):
        self.num_prompt_tokens, self.spelling, self.style = num_prompt_tokens, spelling, style
        self.choices = [_Choice() for _ in range(num_choices)]
        self.stats = SpeculationStats()
        self.head: Json = {"id": f"{self.PREFIX}{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    # -- taking --------------------------------------------------------------------------------------------------

    def take(self, delta: Delta) -> list[Json]:
        """Account for a delta; returns its chunks, should this be a stream."""
        chunks = []
        for part in _single(delta) if self.style.one_by_one else [delta]:
            own = self.choices[part.choice]
            own.num_tokens += len(part.tokens)
            text = "".join(part.pieces)
            logprobs = self._logprobs(part) if self.style.logprobs and part.tokens else None
            if text or part.finish or part.passed or logprobs is not None:
                chunk = self.chunk(part.choice, text, logprobs, last=bool(part.finish))
                reason = part.finish and self.reason(part.choice, part.finish)
                chunk |= {"finish_reason": reason, "stop_reason": part.stop_reason}
                if part.passed:
                    chunk["pilotfish"] = block(part.passed, delta, self.spelling)
                if chunk.get("delta") != {} or part.finish or part.passed or logprobs is not None:
                    chunks.append(self._chunk([chunk]))
            own.text += text
            own.finish, own.stop_reason = part.finish, part.stop_reason
            if part.stats:
                self.stats.per_step_drafted += part.stats.per_step_drafted
                self.stats.per_step_accepted += part.stats.per_step_accepted
        return chunks

    def opening(self) -> list[Json]:
        """Chunks before the first delta."""
        return []

    def closing(self) -> list[Json]:
        """Chunks behind the last delta."""
        return [self._chunk([]) | {"usage": self._usage()} | self._metrics()] if self.style.usage else []

    def whole(self) -> Json:
        """The answer, when all deltas are taken."""
        choices = []
        for index, own in enumerate(self.choices):
            assert own.finish is not None
            ends = {"finish_reason": self.reason(index, own.finish), "stop_reason": own.stop_reason}
            choices.append(self.choice(index, own.text, own.logprobs) | ends)
        kind = {"object": self.KIND, "choices": choices, "usage": self._usage()}
        return self.head | kind | self._metrics()

    # -- what differs --------------------------------------------------------------------------------------------

    @abstractmethod
    def chunk(self, index: int, text: str, logprobs: Json | None, *, last: bool) -> Json:
        """A choice's part of a chunk. last: the choice has no more text."""

    def reason(self, index: int, finish: FinishReason) -> str:
        """Why a choice ended, in OpenAI's words."""
        return str(finish)

    @abstractmethod
    def choice(self, index: int, text: str, logprobs: list[Any]) -> Json:
        """A choice of a whole answer. logprobs: what `_logprobs` kept."""

    @abstractmethod
    def _logprobs(self, part: Delta) -> Json:
        """A part's log-probabilities, which are also kept for the whole."""

    # -- what does not -------------------------------------------------------------------------------------------

    def _chunk(self, choices: list[Json]) -> Json:
        body = self.head | {"object": self.CHUNK_KIND, "choices": choices}
        return body | {"usage": self._usage() if self.style.usage_so_far else None} if self.style.usage else body

    def _usage(self) -> Json:
        completion = sum(own.num_tokens for own in self.choices)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.num_prompt_tokens + completion,
        }

    def _metrics(self) -> Json:
        if self.style.metrics == "none":
            return {}
        block = self.stats.report()
        if self.style.metrics == "summary":
            block = {name: value for name, value in block.items() if name not in _DETAILS}
        return {"metrics": {"speculative_decoding": block}}


class ChatAnswer(Answer):
    """``chat.completion``."""

    KIND, CHUNK_KIND, PREFIX = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def opening(self) -> list[Json]:
        start = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._chunk([{"index": index} | start]) for index in range(len(self.choices))]

    def __init__(self, *words: Any):
        super().__init__(*words)
        self._read = [_Read() for _ in self.choices] if self.style.calls else []

    def chunk(self, index: int, text: str, logprobs: Json | None, *, last: bool) -> Json:
        delta: Json = {"content": text} if text else {}
        if self._read:
            own = self._read[index]
            delta = own.reader.feed(text, last=last)
            own.content += delta.get("content", "")
            joined(own.calls, delta.get("tool_calls", []))
        return {"index": index, "delta": delta, "logprobs": logprobs}

    def reason(self, index: int, finish: FinishReason) -> str:
        called = finish is FinishReason.STOP and self._read and self._read[index].calls
        return "tool_calls" if called else str(finish)

    def choice(self, index: int, text: str, logprobs: list[Any]) -> Json:
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if self._read and self._read[index].calls:
            message |= {"content": self._read[index].content or None, "tool_calls": self._read[index].calls}
        listed = {"content": logprobs, "refusal": None} if self.style.logprobs else None
        return {"index": index, "message": message, "logprobs": listed}

    def _logprobs(self, part: Delta) -> Json:
        entries = [
            self._entry(one.token, one.logprob) | {"top_logprobs": [self._entry(*top) for top in one.top]}
            for one in part.logprobs
        ]
        self.choices[part.choice].logprobs += entries
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        text, raw = self.spelling.spell(token)
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": raw}


class TextAnswer(Answer):
    """``text_completion``."""

    KIND = CHUNK_KIND = "text_completion"
    PREFIX = "cmpl-"

    def chunk(self, index: int, text: str, logprobs: Json | None, *, last: bool) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs}

    def choice(self, index: int, text: str, logprobs: list[Any]) -> Json:
        return {"index": index, "text": text, "logprobs": _columns(logprobs) if self.style.logprobs else None}

    def _logprobs(self, part: Delta) -> Json:
        own, rows = self.choices[part.choice], []
        offset = len(own.text)
        for one, piece in zip(part.logprobs, part.pieces, strict=False):
            rows.append(self._row(one, offset))
            offset += len(piece)
        own.logprobs += rows
        return _columns(rows)

    def _row(self, one: TokenLogprob, offset: int) -> tuple[str, float, dict[str, float], int]:
        listed = {self.spelling.spell(token)[0]: max(value, _LEAST_LOGPROB) for token, value in one.top}
        name, value = self.spelling.spell(one.token)[0], max(one.logprob, _LEAST_LOGPROB)
        return name, value, listed | {name: value}, offset


def _columns(rows: Sequence[tuple[str, float, dict[str, float], int]]) -> Json:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def _single(delta: Delta) -> list[Delta]:
    """The same, one token each; text that had been held back stays with the last."""
    count = len(delta.tokens)
    if count < 2:
        return [delta]
    parts = []
    for i in range(count):
        last = i == count - 1
        part = replace(
            delta,
            tokens=delta.tokens[i : i + 1],
            pieces=delta.pieces[i:] if last else delta.pieces[i : i + 1],
            num_drafted=delta.num_drafted if last else 0,
            num_accepted=int(i < delta.num_accepted),
            logprobs=delta.logprobs[i : i + 1],
        )
        parts.append(part if last else replace(part, finish=None, stop_reason=None, stats=None, passed=None))
    return parts

"""Grammars for structured output, by way of llguidance: from what a user wants to a matcher over this model's tokens.

It does not know requests or drafts. The one trick: a grammar is compiled once, after a trial in a process that can be
killed (`grammar_trial`); each completion gets a copy, which costs microseconds.

llguidance is an optional dependency, imported when the first grammar is wanted.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from ..decoding.grammar import Matcher, StructuredOutputsParams
from ..errors import OptionError, PilotfishError
from ..lazily import torch
from .grammar_trial import LIMITS, try_out
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

MOST_CHARACTERS = 128 * 1024  # of a schema, a regex or a grammar
WHITESPACE = r"[ \n\r\t]{1,64}"  # between JSON's tokens; without a bound, a small model may indent for ever
_MOST_CACHED = 64
_GBNF_RULE = re.compile(r"^\s*[A-Za-z_][\w-]*\s*::=", re.MULTILINE)


class Grammars:
    """Compiled grammars of one model. May be used by several threads. tokenizer: None if there is none."""

    def __init__(self, tokenizer: Tokenizer | None, num_ids: int):
        self.tokenizer, self.num_ids = tokenizer, num_ids
        self._found: OrderedDict[StructuredOutputsParams, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._tokens: Any = None

    def prepare(self, wanted: StructuredOutputsParams) -> None:
        """Compile a grammar, so that `matcher` need not. Raises OptionError if it takes too much or admits nothing."""
        self._compiled(wanted)

    def matcher(self, wanted: StructuredOutputsParams) -> Matcher:
        """A new matcher at the beginning of a text. Raises as `prepare`."""
        return _Matcher(self._compiled(wanted).deep_copy(), self.num_ids, self._tokens)

    def _compiled(self, wanted: StructuredOutputsParams) -> Any:
        with self._lock:
            found = self._found.get(wanted)
        if found is None:
            source = as_source(wanted)
            try:
                found = self._compile(source, wanted.kind)
            except OptionError as error:  # kept too: who sends a grammar that takes for ever sends it again
                found = error
            with self._lock:
                self._found[wanted] = found
                while len(self._found) > _MOST_CACHED:
                    self._found.popitem(last=False)
        if isinstance(found, OptionError):
            raise OptionError(str(found))
        return found

    def _compile(self, source: str, kind: str) -> Any:
        if reason := try_out(source):
            raise _refused(kind, reason)
        llguidance = _library()
        with self._lock:
            if self._tokens is None:
                if self.tokenizer is None:
                    raise OptionError("structured_outputs need a tokenizer, and this model has none")
                self._tokens = self.tokenizer.for_grammars()
        compiled = llguidance.LLMatcher(self._tokens, source, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
        if reason := compiled.get_error():
            raise _refused(kind, reason)
        first = _Matcher(compiled.deep_copy(), self.num_ids, self._tokens)
        try:
            some = bool(first.allowed().any())
        except PilotfishError as error:
            raise _refused(kind, str(error)) from error
        if not some:
            only = "but the empty one" if first.accepting else "that these tokens can spell"
            raise OptionError(f"structured_outputs: this {kind} admits no text {only}")
        return compiled


class _Matcher:
    """llguidance's matcher as a `Matcher`."""

    def __init__(self, state: Any, num_ids: int, tokens: Any):
        self._state, self._num_ids, self._tokens = state, num_ids, tokens

    @property
    def accepting(self) -> bool:
        return bool(self._state.is_accepting())

    def allowed(self) -> Tensor:
        raw = np.frombuffer(self._state.compute_bitmask(), dtype=np.uint8)
        self._check()
        bits = np.unpackbits(raw, bitorder="little")[: self._num_ids]
        listed_V = torch.from_numpy(bits.view(np.bool_))
        listed_V[[end for end in self._tokens.eos_tokens if end < len(listed_V)]] = False
        missing = self._num_ids - len(listed_V)  # models are often padded to more rows than there are tokens
        return listed_V if missing <= 0 else torch.cat([listed_V, listed_V.new_zeros(missing)])

    def take(self, token: int) -> bool:
        if token in self._tokens.eos_tokens or token >= self._tokens.vocab_size:
            return False
        taken = bool(self._state.try_consume_tokens([token]))
        self._check()
        return taken

    def undo(self) -> None:
        if not self._state.rollback(1):
            raise PilotfishError(f"the grammar's state cannot be taken back: {_brief(self._state.get_error())}")

    def copy(self) -> Matcher:
        return _Matcher(self._state.deep_copy(), self._num_ids, self._tokens)

    def _check(self) -> None:
        if self._state.is_error():
            raise PilotfishError(
                f"the grammar leads nowhere here, or grew too large: {_brief(self._state.get_error())}"
            )


def as_source(wanted: StructuredOutputsParams) -> str:
    """llguidance's own form. Raises OptionError for what is too long or no grammar at all."""
    value = getattr(wanted, wanted.kind)
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) > MOST_CHARACTERS:
        raise OptionError(
            f"structured_outputs: this {wanted.kind} has {len(text)} characters; at most {MOST_CHARACTERS} are taken"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise OptionError(f"structured_outputs: this {wanted.kind} is not Unicode: {error.reason}") from error
    matcher = _library().LLMatcher
    if wanted.kind in ("json", "json_object"):
        pattern = WHITESPACE if wanted.whitespace_pattern is None else wanted.whitespace_pattern
        schema = {"type": "object"} if wanted.kind == "json_object" else json.loads(text)
        if schema is True:
            schema = {}
        if schema is False:
            raise OptionError("structured_outputs: the JSON schema false admits nothing")
        return str(matcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": pattern}))
    if wanted.kind == "regex":
        return str(matcher.grammar_from_regex(text))
    if wanted.kind == "choice":
        return str(matcher.grammar_from_lark("start: " + " | ".join(map(quoted, value))))
    if not _GBNF_RULE.search(text):
        return str(matcher.grammar_from_lark(text))
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(matcher.grammar_from_lark(gbnf_to_lark(text)))
    except Exception as error:  # it has a class of its own for faults, and is written recursively
        raise _refused("grammar", str(error)) from error


def quoted(text: str) -> str:
    """A text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _refused(kind: str, reason: str) -> OptionError:
    """The error for a grammar that cannot be compiled."""
    return OptionError(f"structured_outputs: this {kind} cannot be used: {_brief(reason)}")


def _brief(reason: str) -> str:
    if "NoExtension" in reason:
        return "it admits no text that these tokens can spell"
    lines = [line.strip() for line in reason.splitlines() if line.strip() and line.strip() != "<non-verbose/>"]
    text = " ".join(lines[:4])
    return text if len(text) <= 240 else text[:237] + "..."


def _library() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        if error.name != "llguidance":
            raise
        raise OptionError("structured_outputs need llguidance: pip install 'pilotfish[structured]'") from None
    return llguidance

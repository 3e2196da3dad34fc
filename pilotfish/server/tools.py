"""Tool calls: the tools a client offers, the grammar of a call it insists on, and reading calls out of a text.

It does not know models: chat templates say how tools are told to one. Calls are written as Hermes and Qwen write them:

    <tool_call>
    {"name": "weather", "arguments": {"place": "Rome"}}
    </tool_call>

The one trick: `CallReader` is fed text as it comes, in pieces of any size, and sends arguments on as they are written;
only what may still turn out to be something else is held back. A whole answer is read by the same reader.
"""

import json
import re
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ..decoding.grammar import StructuredOutputsParams
from ..models.grammars import WHITESPACE, quoted
from .refusals import Json, Refusal
from .structured import Strict

MOST_TOOLS = 128
OPEN, CLOSE = "<tool_call>", "</tool_call>"
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]

_HEAD = re.compile(OPEN + r'\s*\{\s*"name"\s*:\s*"([\w.-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_NAME = re.compile(r"[\w.-]+")
_TAIL = re.compile(r"\s*\}\s*" + CLOSE)
_MAYBE_TAIL = re.compile(r"\s*(\}\s*(" + "".join(f"({re.escape(c)}" for c in CLOSE) + ")?" * len(CLOSE) + ")?)?")


class Function(Strict):
    """A function that the model may call. parameters: a JSON schema. ``strict`` may say what it likes."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function

    def plain(self) -> Json:
        """As chat templates want it."""
        told = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": {"parameters": _NO_PARAMETERS} | told}


class ChosenFunction(Strict):
    name: str


class Chosen(Strict):
    """``tool_choice`` that names a function."""

    type: Literal["function"]
    function: ChosenFunction


class CalledFunction(Strict):
    name: str
    arguments: str


class Called(Strict):
    """A call that was made earlier in the conversation."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self, place: str) -> Json:
        """As chat templates want it: arguments are an object there, and text in OpenAI's messages. Raises Refusal for a
        text that is none; place: of this call."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
            json.dumps(arguments, ensure_ascii=False).encode()  # half of a surrogate pair is not Unicode
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            place += ".function.arguments"
            raise Refusal(400, f"{place}: this must be the text of a JSON object", param=place)
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


_NO_PARAMETERS: Json = {"type": "object", "properties": {}}


def call_grammar(tools: Sequence[Tool], *, several: bool) -> StructuredOutputsParams:
    """An answer that is a call of one of these tools, or calls. Raises Refusal for parameters that are no object."""
    calls, rules = [], []
    for i, tool in enumerate(tools):
        head = f'{OPEN}\n{{"name": {json.dumps(tool.function.name)}, "arguments": '
        calls.append(f"call{i}")
        rules.append(f"call{i}: {quoted(head)} args{i} {quoted('}' + chr(10) + CLOSE)}")
        rules.append(f"args{i}: %json {json.dumps(_schema(i, tool))}")
    start = 'start: call ("\\n" call)*' if several else "start: call"
    return StructuredOutputsParams(grammar="\n".join([start, f"call: {' | '.join(calls)}", *rules]))


def _schema(index: int, tool: Tool) -> Json:
    schema = tool.function.parameters or {**_NO_PARAMETERS, "additionalProperties": False}
    if schema.get("type", "object") != "object":
        place = f"tools.{index}.function.parameters"
        raise Refusal(400, f"{place}: its type must be object, not {schema['type']!r}", param=place)
    return {"x-guidance": {"whitespace_pattern": WHITESPACE}, "type": "object"} | schema


class CallReader:
    """Reads calls out of one completion's text. `feed` returns what became certain, as a delta of OpenAI's, which has
    ``content``, ``tool_calls``, both or neither. What begins like a call and is none is content after all."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._state = self._read_content
        self._left = ""  # not yet certain
        self._behind_call = False  # directly; white space there is nothing
        self._space = ""  # before what begins like a call
        self._content: list[str] = []
        self._calls: dict[int, Json] = {}  # what is new of each call
        self._depth, self._in_string, self._escaped = 0, False, False

    def feed(self, text: str, *, last: bool = False) -> Json:
        """Go on with the text, which may end here."""
        self._left += text
        while self._left and self._state():
            pass
        if last:
            self._end()
        delta: Json = {}
        if content := "".join(self._content):
            delta["content"] = content
        if self._calls:
            delta["tool_calls"] = list(self._calls.values())
        self._content, self._calls = [], {}
        return delta

    def _end(self) -> None:
        called = self._state == self._read_head and self._take_call(self._left[len(OPEN) :])
        between = self._state == self._read_content and self._behind_call and not self._left.strip()
        if not called and not between and self._state != self._read_tail:
            self._content.append((self._space if self._state == self._read_head else "") + self._left)
        self._left = ""

    # Each state takes what it can from the text that is left, and returns whether it took any.

    def _read_content(self) -> bool:
        if self._behind_call:
            self._left = self._left.lstrip()
        before, found, after = self._left.partition(OPEN)
        if found:
            self._content.append(before.rstrip())
            self._space = before[len(before.rstrip()) :]
            self._left, self._state = OPEN + after, self._read_head
            return True
        size = len(self._left.rstrip())
        begun = next((n for n in range(min(len(OPEN), size), 0, -1) if self._left.endswith(OPEN[:n])), 0)
        kept = len(self._left[: len(self._left) - begun].rstrip())
        self._behind_call = self._behind_call and not kept
        self._content.append(self._left[:kept])
        self._left = self._left[kept:]
        return False

    def _read_head(self) -> bool:
        if head := _HEAD.match(self._left):
            self._begin(head[1])
            self._left, self._state = self._left[head.end() :], self._read_arguments
            self._depth, self._in_string, self._escaped = 0, False, False
            return True
        body, found, after = self._left[len(OPEN) :].partition(CLOSE)
        if not found:
            return False
        self._behind_call = self._take_call(body)
        if not self._behind_call:
            self._content.append(self._space + OPEN + body + CLOSE)
        self._left, self._state = after, self._read_content
        return True

    def _read_arguments(self) -> bool:
        """Of arguments, each character is certain. They end where their braces do."""
        for place, letter in enumerate(self._left):
            if self._in_string:
                self._in_string = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self._in_string = True
            elif letter in "{}":
                self._depth += 1 if letter == "{" else -1
                if self._depth == 0:
                    self._argue(self._left[: place + 1])
                    self._left, self._state = self._left[place + 1 :], self._read_tail
                    return True
        self._argue(self._left)
        self._left = ""
        return False

    def _read_tail(self) -> bool:
        if tail := _TAIL.match(self._left):
            self._left = self._left[tail.end() :]
        elif _MAYBE_TAIL.fullmatch(self._left):
            return False
        else:  # a brace or the closing tag is missing; the arguments have been sent, so this is the best to be done
            self._left = self._left.lstrip().removeprefix("}")
        self._state, self._behind_call = self._read_content, True
        return True

    def _begin(self, name: str) -> None:
        call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": ""}}
        self._calls[self.num_calls] = {"index": self.num_calls} | call
        self.num_calls += 1

    def _argue(self, text: str) -> None:
        index = self.num_calls - 1
        new = self._calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
        new["function"]["arguments"] += text

    def _take_call(self, body: str) -> bool:
        """A call whose parts stand in another order, or that ends with the text."""
        try:
            call = json.loads(body)
        except (ValueError, RecursionError):
            return False
        if not isinstance(call, dict) or not _NAME.fullmatch(str(call.get("name"))):
            return False
        arguments = call.get("arguments", call.get("parameters", {}))
        if not isinstance(arguments, dict):
            return False
        self._begin(call["name"])
        self._argue(json.dumps(arguments))
        return True


def joined(calls: list[Json], new: Sequence[Json]) -> None:
    """Add deltas of calls to whole ones, in place."""
    for delta in new:
        if delta["index"] == len(calls):
            calls.append({"id": delta["id"], "type": "function", "function": dict(delta["function"])})
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]

"""The turns of a conversation: OpenAI's messages, and what chat templates want of them.

It does not know the model's template. The one trick: an answer of ours can be sent back as it came; the fields of it
that mean nothing in a prompt are known, and must be empty.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from .refusals import Json, Refusal
from .structured import Strict
from .tools import MOST_TOOLS, Called


class TextPart(Strict):
    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(fail_fast=True)]


_NO_CALLS, _NO_ID = {"type": ["array", "null"], "maxItems": 0}, {"type": ["string", "null"], "maxLength": 0}
_SAID = {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}}
_CALLED = {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}}
_ROLES = [  # what `Message.plain` checks
    {"properties": {"role": {"const": "assistant"}, "tool_call_id": _NO_ID}, "anyOf": [_SAID, _CALLED]},
    {"properties": {"role": {"const": "tool"}, "tool_calls": _NO_CALLS}, "allOf": [_SAID]},
    {
        "properties": {
            "role": {"enum": ["system", "developer", "user"]},
            "tool_calls": _NO_CALLS,
            "tool_call_id": _NO_ID,
        },
        "allOf": [_SAID],
    },
]


class Message(Strict):
    """One turn. ``developer`` is OpenAI's newer word for ``system``."""

    model_config = ConfigDict(json_schema_extra={"oneOf": _ROLES})  # type: ignore[dict-item]

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[Called], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    # Our own answers, and OpenAI's, have these; clients send them back as they were.
    refusal: None = None
    annotations: Annotated[list[None], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    def plain(self, place: str) -> Json:
        """As chat templates want it. Raises Refusal for what does not fit the role; place: of this message."""
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) and self.role != role:
                told = f"{place}.{name}: this is for the role {role}, not {self.role}"
                raise Refusal(400, told, param=f"{place}.{name}")
        if self.content is None and not self.tool_calls:
            told = f"{place}.content: the role {self.role} needs a text here"
            raise Refusal(400, told, param=f"{place}.content")
        content = "" if self.content is None else as_text(self.content)
        turn: Json = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            turn["tool_calls"] = [call.plain(f"{place}.tool_calls.{i}") for i, call in enumerate(self.tool_calls)]
        named = {"name": self.name, "tool_call_id": self.tool_call_id}
        return turn | {name: value for name, value in named.items() if value is not None}


def turns(messages: Sequence[Message]) -> list[Json]:
    """A conversation as chat templates want it. Raises as `Message.plain`."""
    return [message.plain(f"messages.{i}") for i, message in enumerate(messages)]


def as_text(content: Content) -> str:
    """The text of a message's content."""
    return content if isinstance(content, str) else "".join(part.text for part in content)

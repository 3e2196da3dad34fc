"""JSON schemas of the answers, for the OpenAPI document: of what `answers` writes, whole and as a stream's events.

They do not know how answers are made. The one trick: objects are closed, so a field that is added to an answer and not
here is found by any tool that compares the two.
"""

from .refusals import Json

_TEXT: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_COUNTS: Json = {"type": "array", "items": _COUNT}
_NUMBER: Json = {"type": "number"}
_NOTHING: Json = {"type": "null"}


def _object(_optional: tuple[str, ...] = (), /, **properties: Json) -> Json:
    required = [name for name in properties if name not in _optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, _NOTHING]}


_USAGE = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
_DRAFTING = _object(
    ("per_step_accepted", "per_step_drafted"),
    mean_acceptance_length={"type": "number", "minimum": 1},
    draft_acceptance_rate={"type": "number", "minimum": 0, "maximum": 1},
    acceptance_histogram=_COUNTS,
    acceptance_histogram_by_draft_length={"type": "object", "additionalProperties": _COUNTS},
    num_spec_steps=_COUNT,
    num_accepted_draft_tokens=_COUNT,
    num_draft_tokens=_COUNT,
    num_spec_tokens=_COUNT,
    per_step_accepted=_COUNTS,
    per_step_drafted=_COUNTS,
)
_STOP: Json = {"type": ["string", "integer", "null"]}
_TOKEN = {"token": _TEXT, "logprob": {"type": "number", "maximum": 0}, "bytes": _COUNTS}
_LISTED = _object(content=_list(_object(**_TOKEN, top_logprobs=_list(_object(**_TOKEN)))), refusal=_NOTHING)
_COLUMNS = _object(
    tokens=_list(_TEXT),
    token_logprobs=_list(_NUMBER),
    top_logprobs=_list({"type": "object", "additionalProperties": _NUMBER}),
    text_offset=_COUNTS,
)
_CALL = _object(id=_TEXT, type={"const": "function"}, function=_object(name=_TEXT, arguments=_TEXT))
_MESSAGE = _object(
    ("tool_calls",),
    role={"const": "assistant"},
    content=_or_null(_TEXT),
    refusal=_NOTHING,
    tool_calls=_list(_CALL),
)


def _answer(kind: str, reasons: list[str], **choice: Json) -> Json:
    ends = {"finish_reason": {"enum": reasons}, "stop_reason": _STOP}
    return _object(
        ("metrics",),
        id=_TEXT,
        created=_COUNT,
        model=_TEXT,
        object={"const": kind},
        choices=_list(_object(index=_COUNT, **choice, **ends)),
        usage=_USAGE,
        metrics=_object(speculative_decoding=_DRAFTING),
    )


def _event(kind: str, reasons: list[str], **choice: Json) -> Json:
    """A server-sent event, as tools that read them see it: ``data`` is a chunk, an error, or the end."""
    own = _object(
        ("stop_reason", "pilotfish"),
        index=_COUNT,
        **choice,
        finish_reason={"enum": [*reasons, None]},
        stop_reason=_STOP,
        pilotfish={"type": "object"},
    )
    chunk = _object(
        ("usage", "metrics"),
        id=_TEXT,
        created=_COUNT,
        model=_TEXT,
        object={"const": kind},
        choices=_list(own),
        usage=_or_null(_USAGE),
        metrics=_object(speculative_decoding=_DRAFTING),
    )
    error = {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}}
    json = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": [chunk, error]}}
    return {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [{"const": "[DONE]"}, json]}}}


_DELTA = _object(
    ("role", "content", "tool_calls"),
    role={"const": "assistant"},
    content=_TEXT,
    tool_calls=_list(
        _object(
            ("id", "type"),
            index=_COUNT,
            id=_TEXT,
            type={"const": "function"},
            function=_object(("name",), name=_TEXT, arguments=_TEXT),
        )
    ),
)
_CHAT_REASONS, _TEXT_REASONS = ["stop", "length", "tool_calls"], ["stop", "length"]
_MODEL = _object(
    id=_TEXT,
    object={"const": "model"},
    created=_COUNT,
    owned_by=_TEXT,
    root=_TEXT,
    parent=_NOTHING,
    max_model_len=_COUNT,
)
ANSWERS: Json = {
    "ChatAnswer": _answer("chat.completion", _CHAT_REASONS, message=_MESSAGE, logprobs=_or_null(_LISTED)),
    "ChatEvent": _event("chat.completion.chunk", _CHAT_REASONS, delta=_DELTA, logprobs=_or_null(_LISTED)),
    "TextAnswer": _answer("text_completion", _TEXT_REASONS, text=_TEXT, logprobs=_or_null(_COLUMNS)),
    "TextEvent": _event("text_completion", _TEXT_REASONS, text=_TEXT, logprobs=_or_null(_COLUMNS)),
    "Tokens": _object(count=_COUNT, max_model_len=_COUNT, tokens=_COUNTS, token_strs=_or_null(_list(_TEXT))),
    "Models": _object(object={"const": "list"}, data=_list(_MODEL)),
    "Model": _MODEL,
    "Health": _object(status=_TEXT),
}

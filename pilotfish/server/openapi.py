"""The OpenAPI document: what the routes take and answer, in the words of `protocol`.

It does not know the routes' code. The one trick: bodies are described by the classes that check them.
"""

from .. import version
from .answer_schemas import ANSWERS
from .protocol import schemas
from .refusals import Json

_ERRORS = {
    400: "a field is wrong, unknown or not served here; the message names it",
    401: "the API key is missing or wrong",
    404: "no such model",
    408: "the body took too long",
    413: "the body is too large",
    415: "the body is not application/json",
    429: "the queue is full; Retry-After says when to come back",
    500: "the request failed",
    503: "the server is ending",
    504: "the request took too long",
}


def document(model: str, *, key: bool = False, protect_metrics: bool = False) -> Json:
    """The whole, as JSON. model: the one served. key: whether clients must send one; protect_metrics: /metrics too."""
    found = {**schemas(), **ANSWERS, "Error": _ERROR}
    for body in ("Chat", "Text", "Tokenize"):
        found[body]["properties"]["model"] = {"enum": [model, None]}
    named = {"parameters": [{"name": "name", "in": "path", "required": True, "schema": {"enum": [model]}}]}
    health: Json = {"security": []}
    metrics = {} if protect_metrics else health
    return {
        "openapi": "3.1.0",
        "info": {"title": "pilotfish", "version": version.VERSION},
        "paths": {
            "/v1/chat/completions": {"post": _post("Answer a conversation", "Chat", "ChatAnswer", "ChatEvent")},
            "/v1/completions": {"post": _post("Complete a text", "Text", "TextAnswer", "TextEvent")},
            "/tokenize": {"post": _post("The token ids of a text or a conversation", "Tokenize", "Tokens")},
            "/v1/models": {"get": _get("The model that is served", "Models")},
            "/v1/models/{name}": {"get": _get("The model, if it is served", "Model", errors=(401, 404)) | named},
            "/health": {"get": _get("Whether requests are taken", "Health", unready="Health") | health},
            "/health/live": {"get": _get("Whether the process answers", "Health", errors=()) | health},
            "/health/ready": {"get": _get("Whether requests are taken", "Health", unready="Health") | health},
            "/metrics": {"get": _get("Numbers for Prometheus", None) | metrics},
        },
        "components": {
            "schemas": found,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}] if key else [],
    }


_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _post(summary: str, body: str, answer: str, event: str | None = None) -> Json:
    """event: the schema of a streamed answer's events."""
    content = _content(answer)
    if event:
        content |= {"text/event-stream": {"schema": {"$ref": f"#/components/schemas/{event}"}}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": _content(body)},
        "responses": {"200": {"description": "the answer", "content": content}} | _failures(tuple(_ERRORS)),
    }


def _get(summary: str, answer: str | None, errors: tuple[int, ...] = (401,), unready: str | None = None) -> Json:
    """answer: the schema of the JSON, None for plain text. unready: that of a 503."""
    content = _content(answer) if answer else {"text/plain": {"schema": {"type": "string"}}}
    answers = {"200": {"description": summary, "content": content}} | _failures(() if unready else errors)
    if unready:
        answers["503"] = {"description": _ERRORS[503], "content": _content(unready)}
    return {"summary": summary, "responses": answers}


def _failures(statuses: tuple[int, ...]) -> Json:
    return {str(status): {"description": _ERRORS[status], "content": _content("Error")} for status in statuses}


def _content(name: str) -> Json:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}

"""The OpenAPI document: what the routes take and answer, in the words of `protocol`.

It does not know the routes' code. The one trick: bodies are described by the classes that check them.
"""

from .. import version
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


def document() -> Json:
    """The whole, as JSON."""
    found = {**schemas(), "Error": _ERROR}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pilotfish", "version": version.VERSION},
        "paths": {
            "/v1/chat/completions": {"post": _post("Answer a conversation", "Chat")},
            "/v1/completions": {"post": _post("Complete a text", "Text")},
            "/tokenize": {"post": _post("The token ids of a text or a conversation", "Tokenize")},
            "/v1/models": {"get": _get("The model that is served")},
            "/health": {"get": _get("Whether requests are taken", errors=(503,))},
            "/health/live": {"get": _get("Whether the process answers", errors=())},
            "/health/ready": {"get": _get("Whether requests are taken", errors=(503,))},
            "/metrics": {"get": _get("Numbers for Prometheus", media="text/plain")},
        },
        "components": {
            "schemas": found,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
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


def _post(summary: str, body: str) -> Json:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body}"}}}
    answer = {"application/json": {"schema": {"type": "object"}}}
    if body != "Tokenize":
        answer |= {"text/event-stream": {"schema": {"type": "string"}}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": content},
        "responses": {"200": {"description": "the answer", "content": answer}} | _failures(tuple(_ERRORS)),
    }


def _get(summary: str, media: str = "application/json", errors: tuple[int, ...] = (401,)) -> Json:
    schema = {"type": "string"} if media == "text/plain" else {"type": "object"}
    answer = {"200": {"description": summary, "content": {media: {"schema": schema}}}}
    return {"summary": summary, "responses": answer | _failures(errors)}


def _failures(statuses: tuple[int, ...]) -> Json:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {str(status): {"description": _ERRORS[status], "content": content} for status in statuses}

"""The page at ``/``: a chat that shows where each token came from. Static files, and headers that forbid all else.

It does not know the model, and holds no secret: whoever may not use the API sees a page that asks for the key. The one
trick: the page is a client like any other, of `/v1/chat/completions` with a trace (`passes`).
"""

from functools import partial
from importlib import resources
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    # What the page loads and whom it asks is this server; text that looks like markup can do nothing.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def _address(name: str) -> str:
    return "/" if name == "index.html" else f"/page/{name}"


_FILES = {_address(file.name): file for file in (resources.files(__package__) / "static").iterdir()}
PATHS = tuple(_FILES)


def routes() -> list[Route]:
    """One per file."""
    return [Route(path, partial(_serve, file)) for path, file in _FILES.items()]


async def _serve(file: Traversable, _request: Request) -> Response:
    return Response(file.read_bytes(), media_type=_KINDS[file.name.rpartition(".")[2]], headers=_HEADERS)

"""What clients reach: an ASGI app that hands each request to a replica, and to another one if that dies.

It does not know Ray, routes or JSON's meaning. The one trick: nothing goes to the client before the first byte of a
body is there. Until then a request whose replica died is simply asked again; from then on it ends as the app itself
would end it, with an error event, so that no client takes half an answer for a whole one.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Incoming
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ..server.app import JSONResponse
from ..server.bodies import read_body
from ..server.metrics import CONTENT_TYPE
from ..server.options import ServeOptions
from ..server.refusals import Refusal
from ..server.streams import END, GoneError, event, unless_gone
from .replica import Request
from .routing import conversation

log = logging.getLogger(__name__)
_NUM_TRIES = 5  # a request whose replicas die one after the other may be what kills them
_HEALTH_PATIENCE = 5.0  # seconds
_METRICS_PATIENCE = 10.0
_HEALTH = ("/health", "/health/ready")


class LostError(Exception):
    """The replica that was asked is gone, and its answer with it."""


class BusyError(Exception):
    """No replica takes more requests, and enough of them wait."""


class Replicas(Protocol):
    """The replicas as one; `pilotfish.scale.deploy` has Ray's."""

    def ask(self, request: Request, body: bytes, conversation: str | None) -> AsyncGenerator[list[Message]]:
        """A replica's messages. Raises LostError if it dies under way, BusyError if none has room."""

    async def metrics(self) -> Mapping[str, str]:
        """Prometheus' text of each replica that answers, by its name."""


class Front:
    """The ASGI application. options: for the bounds on what a client may send, and how long it waits."""

    def __init__(self, replicas: Replicas, options: ServeOptions):
        self.replicas, self.options = replicas, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await _lifespan(receive, send)
        if scope["type"] != "http":
            return None  # uvicorn refuses it then
        if scope["path"] == "/health/live":
            return await JSONResponse({"status": "live"})(scope, receive, send)
        answer = _Answer(send)
        try:
            await self._answer(Incoming(scope, receive), answer)
        except (GoneError, ClientDisconnect):
            pass
        except Refusal as refusal:
            await answer.end(refusal)
        return None

    async def _answer(self, incoming: Incoming, answer: "_Answer") -> None:
        body = await read_body(incoming, self.options)
        path = incoming.url.path
        request = {
            "method": incoming.method,
            "path": path,
            "query_string": incoming.scope["query_string"],
            "headers": [(bytes(name), bytes(value)) for name, value in incoming.scope["headers"]],
        }
        patience = _HEALTH_PATIENCE if path in _HEALTH else self.options.request_timeout
        if path == "/metrics":
            await unless_gone(incoming.receive, self._metrics(request, answer))
            return
        work = self._relay(request, body, conversation(path, body), answer, patience)
        await unless_gone(incoming.receive, work)

    async def _relay(self, request: Request, body: bytes, name: str | None, answer: "_Answer", patience: float) -> None:
        """Hand the answer of a replica on. Raises Refusal if there is none, or the rest of it is lost."""
        try:
            async with asyncio.timeout(patience) as limit:
                for _ in range(_NUM_TRIES):
                    answer.forget()
                    try:
                        async with contextlib.aclosing(self.replicas.ask(request, body, name)) as messages:
                            async for some in messages:
                                await answer.take(some)
                                if answer.begun:
                                    limit.reschedule(None)  # a replica bounds what it has begun
                        return
                    except LostError as error:
                        log.warning("a replica was lost under %s %s: %s", request["method"], request["path"], error)
                        if answer.begun:
                            told = "the machine that wrote this answer was lost; ask again"
                            raise Refusal(502, told, code="replica_lost") from None
        except TimeoutError:
            told = "no engine was free in the time that this server allows"
            raise Refusal(503 if request["path"] in _HEALTH else 504, told, code="timeout") from None
        except BusyError:
            told = "all engines are busy, and enough requests wait; try again in 1 s"
            raise Refusal(429, told, code="queue_full", retry_after=1) from None
        told = f"{_NUM_TRIES} engines were lost with this request, one after the other"
        raise Refusal(500, told, code="replica_lost")

    async def _metrics(self, request: Request, answer: "_Answer") -> None:
        """Every replica's, if the app of one of them would show its own: it knows who may see them."""
        one = _Answer(None)
        await self._relay(request, b"", None, one, _METRICS_PATIENCE)
        if one.status != 200:
            await answer.take(one.held)
            return
        try:
            async with asyncio.timeout(_METRICS_PATIENCE):
                texts = await self.replicas.metrics()
        except TimeoutError:
            raise Refusal(504, "the replicas did not say their numbers in time", code="timeout") from None
        await answer.respond(Response(merged(texts), media_type=CONTENT_TYPE))


class _Answer:
    """What goes to a client: nothing, until a body begins. send: None to keep it all."""

    def __init__(self, send: Send | None):
        self._send = send
        self.held: list[Message] = []
        self.status = 0
        self.begun = self._streams = self._ended = False

    def forget(self) -> None:
        """What was held back is of a replica that is gone."""
        assert not self.begun
        self.held.clear()

    async def take(self, messages: Sequence[Message]) -> None:
        """The next messages of a replica."""
        for message in messages:
            self.held.append(message)
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self._streams = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
            elif self._send and (message.get("body") or not message.get("more_body")):
                held, self.held, self.begun = self.held, [], True
                self._ended = not message.get("more_body")
                for one in held:
                    await self._send(one)

    async def end(self, refusal: Refusal) -> None:
        """With an error: as an event, if events have begun. Raises it if half of something else was sent, which
        breaks the connection: the client must not take it for the whole."""
        assert self._send is not None
        if not self.begun:
            await self.respond(JSONResponse(refusal.body, status_code=refusal.status, headers=refusal.headers))
        elif self._streams and not self._ended:
            await self._send({"type": "http.response.body", "body": event(refusal.body) + END, "more_body": False})
        elif not self._ended:
            raise refusal

    async def respond(self, response: Response) -> None:
        """With this, instead of anything of a replica."""
        assert self._send is not None and not self.begun
        self.begun = True
        await self._send(
            {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        )
        await self._send({"type": "http.response.body", "body": response.body, "more_body": False})


async def _lifespan(receive: Receive, send: Send) -> None:
    for phase in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{phase}.complete"})


def merged(texts: Mapping[str, str]) -> bytes:
    """One page of Prometheus from several: each number gets a label ``replica``, the name it is listed under."""
    families: dict[str, Metric] = {}
    for name, text in sorted(texts.items()):
        for family in text_string_to_metric_families(text):
            into = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            into.samples += [one._replace(labels={**one.labels, "replica": name}) for one in family.samples]
    registry = CollectorRegistry()
    registry.register(_Fixed(list(families.values())))
    return generate_latest(registry)


class _Fixed:
    def __init__(self, families: list[Metric]):
        self._families = families

    def collect(self) -> Any:
        """What Prometheus' registry asks for."""
        return self._families

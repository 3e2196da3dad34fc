"""Sending to clients that may leave at any moment: `unless_gone`, and server-sent events.

It does not know what is sent. The one trick: while we work, somebody listens to the client; when it hangs up, the work
is cancelled where it stands, not when it next has something to say.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .engine_thread import Ticket
from .refusals import Json, Refusal

Result = TypeVar("Result")
_PATIENCE = 10.0  # seconds beyond the deadline that the last bytes of a stream may take
END = b"data: [DONE]\n\n"


class GoneError(Exception):
    """The client hung up."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work, or cancel it when the client hangs up; then raises GoneError. The body must have been read."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise GoneError
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, one per chunk, then ``[DONE]``. Closes the ticket, however it ends.

    An error under way becomes an event, since the status is long sent.
    """

    media_type = "text/event-stream"

    def __init__(self, ticket: Ticket, chunks: AsyncGenerator[list[Json]]):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.ticket, self.chunks = ticket, chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout_at(self.ticket.deadline + _PATIENCE):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await unless_gone(receive, self._send_all(send))
        except (GoneError, TimeoutError, OSError):
            pass  # nobody is there, or nobody who reads
        finally:
            self.ticket.close()

    async def _send_all(self, send: Send) -> None:
        try:
            async with aclosing(self.chunks) as lists:
                async for chunks in lists:
                    if chunks:
                        await _write(send, b"".join(map(event, chunks)))
        except Refusal as refusal:
            await _write(send, event(refusal.body))
        await _write(send, END)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _write(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


def event(value: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"

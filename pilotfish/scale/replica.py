"""One engine behind its server's app, asked without a socket: a request in, ASGI messages out.

It does not know Ray. The one trick: the app is the very one that `pilotfish serve` runs, called as uvicorn calls it,
so that an answer does not depend on how many machines there are; when the caller goes, the app sees a client hang up.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from starlette.types import ASGIApp, Message

from ..llm import LLM
from ..server.app import Server
from ..server.options import ServeOptions

log = logging.getLogger(__name__)
Request = dict[str, Any]  # what of a scope can be sent to another machine


class Makes(Protocol):
    """Whatever makes an LLM; `pilotfish.scale.recipe.Recipe` is one."""

    def make(self) -> LLM:
        """Load it."""


class Replica:
    """Loads the model at once, and starts the engine's thread: make it on a running event loop."""

    def __init__(self, recipe: Makes, options: ServeOptions):
        self.server = Server(recipe.make(), options)
        self.server.engine.start()

    async def ask(self, request: Request, body: bytes) -> AsyncGenerator[list[Message]]:
        """The app's messages, as many at once as there are. request: method, path, query_string and headers."""
        async with contextlib.aclosing(_messages(self.server.app, request, body)) as messages:
            async for some in messages:
                yield some

    def metrics(self) -> str:
        """Prometheus' text, of this engine."""
        return self.server.metrics.page().decode()

    def check_health(self) -> None:
        """Raises RuntimeError if the engine's thread has ended."""
        if not self.server.engine.ready:
            raise RuntimeError("the engine's thread has ended")

    def close(self) -> None:
        """End the engine's thread."""
        self.server.close()


async def _messages(app: ASGIApp, request: Request, body: bytes) -> AsyncGenerator[list[Message]]:
    answers: asyncio.Queue[Message | None] = asyncio.Queue()  # None: there are no more
    gone, asked = asyncio.Event(), False

    async def receive() -> Message:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        answers.put_nowait(dict(message))

    async def run() -> None:
        try:
            await app(_scope(request), receive, send)
        except Exception:  # the app has told the client already
            log.exception("a request failed")
        finally:
            answers.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        ended = False
        while not ended:
            some = [await answers.get()]
            while not answers.empty():
                some.append(answers.get_nowait())
            ended = some[-1] is None
            if ready := [message for message in some if message is not None]:
                yield ready
    finally:
        gone.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _scope(request: Request) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "raw_path": request["path"].encode(),
        "client": None,
        "server": None,
        **request,
    }

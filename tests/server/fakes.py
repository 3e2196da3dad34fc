"""A server around a table model and a byte tokenizer, and readers of what it sends.

They know the HTTP interface. The one trick: the model's law is a table, so `expected` needs no server to know the text.
"""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from starlette.testclient import TestClient

from pilotfish import LLM, Completion, SamplingParams
from pilotfish.models.load import Loaded
from pilotfish.server.app import Server
from pilotfish.server.options import ServeOptions
from pilotfish.server.run import _Uvicorn, bind
from tests.fakes import ByteTokenizer, TableModel


class Bytes(ByteTokenizer):
    """Tokens named as SentencePiece names bytes, so that each is written in its own way."""

    def __init__(self) -> None:
        super().__init__(257)
        self.__dict__["vocabulary"] = {f"<0x{i:02X}>": i for i in range(256)} | {"<eos>": 256}


TOKENIZER = Bytes()
MESSAGES = [{"role": "user", "content": "hi"}]
PHRASE = "aéb€c🐠"  # says each byte once, so that a table of order 1 can say it for ever


class Gated(TableModel):
    """A pass waits until it may go on; ``gate.set()`` opens for good. num_broken: passes to come that raise."""

    def __init__(self, *words: Any, **named: Any):
        super().__init__(*words, **named)
        self.gate = threading.Event()
        self.gate.set()
        self.num_broken = 0

    def forward(self, *words: Any, **named: Any) -> Any:
        assert self.gate.wait(20), "nobody opened the gate"
        if self.num_broken:
            self.num_broken -= 1
            raise RuntimeError("a pass that fails")
        return super().forward(*words, **named)


def table(**named: Any) -> Gated:
    """Says random bytes, much of it no character, and seldom the end of the text."""
    model = Gated(257, order=1, num_phases=1, seed=3, sharpness=2.0, eos={256}, **named)
    model.table[:, :, 256] -= 2
    return model


def singer(**named: Any) -> Gated:
    """Says PHRASE again and again, whatever stands before it."""
    model = table(**named)
    song = PHRASE.encode()
    model.table[:] = 0
    model.table[:, :, song[0]] = 30
    for now, after in zip(song, song[1:] + song[:1], strict=True):
        model.table[:, now] = 0
        model.table[:, now, after] = 40
    return model


def an_llm(model: TableModel | None = None, **options: Any) -> LLM:
    return LLM.from_model(
        Loaded(model or table(), options.pop("tokenizer", TOKENIZER)),
        **({"method": "ngram", "num_speculative_tokens": 6, "block_size": 4} | options),
    )


def a_server(model: TableModel | None = None, *, llm: Mapping[str, Any] | None = None, **options: Any) -> Server:
    return Server(an_llm(model, **(llm or {})), ServeOptions(**options))


@contextlib.contextmanager
def serving(server: Server) -> Iterator[TestClient]:
    """A client of a server that runs; afterwards nothing may be left of any request."""
    with TestClient(server.app, raise_server_exceptions=False) as client:
        yield client
    nothing_is_left(server)


@contextlib.asynccontextmanager
async def running(server: Server) -> AsyncIterator[Server]:
    """The same on the test's own event loop."""
    async with server.app.router.lifespan_context(server.app):
        yield server
    nothing_is_left(server)


@contextlib.contextmanager
def listening(server: Server) -> Iterator[str]:
    """The address of a server that runs in a thread, on a real socket; afterwards as above."""
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        program = _Uvicorn(server)
        thread = threading.Thread(target=program.run, args=([listener],))
        thread.start()
        try:
            wait_until(lambda: program.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            program.should_exit = True
            thread.join(20)
    assert not thread.is_alive()
    nothing_is_left(server)


def nothing_is_left(server: Server) -> None:
    engine = server.llm.engine
    assert server.engine.num_open == 0, "places were not given back"
    assert not server.engine._open
    assert not engine.has_work
    assert engine.cache.pool.num_held == 0
    assert not [thread for thread in threading.enumerate() if thread is server.engine._thread]


def events(response: Any) -> list[dict[str, Any]]:
    """The chunks of a stream; its end is checked."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a stream."""
    own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(one["text"] if "text" in one else one["delta"].get("content", "") for one in own)


def expected(
    prompt: str | list[int], params: SamplingParams, model: TableModel | None = None, **options: Any
) -> list[Completion]:
    """What the library says, plainly decoded."""
    return an_llm(model, method="none", **options).generate(prompt, params)


class Caller:
    """One request at ASGI level, which may hang up. body: sent at once; stall: the client never sends the rest."""

    def __init__(self, server: Server, path: str, body: Any, *, stall: bool = False):
        self.server, self.sent = server, list[Any]()
        self.hung_up, self.stall = asyncio.Event(), stall
        self.received = asyncio.Event()  # something of a body
        self._body: bytes | None = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json")],
            "client": ("testclient", 1),
            "server": ("testserver", 80),
        }

    async def run(self) -> None:
        await self.server.app(self.scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": self.stall}
        await self.hung_up.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        if message.get("body"):
            self.received.set()

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


def wait_until(fact: Any, seconds: float = 10.0) -> None:
    """Wait until something holds, where there is no event loop."""
    deadline = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < deadline, "this never came true"
        time.sleep(0.01)


async def until(fact: Any, seconds: float = 10.0) -> None:
    """Wait until something holds, on the event loop."""
    async with asyncio.timeout(seconds):
        while not fact():
            await asyncio.sleep(0.002)

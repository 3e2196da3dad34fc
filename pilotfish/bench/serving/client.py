"""Clients on bare sockets, well-behaved and not.

They do not know what a good answer is. The one trick: of HTTP they know as little as they can, for a client library
would take more of the processor than the server it measures, and none lets a client misbehave. Each chunk of a stream
comes as lines, and those that begin with ``data:`` are all there is to read.
"""

import asyncio
import contextlib
import json
import socket
import struct
from dataclasses import dataclass
from typing import Any

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a stream. error: what went wrong, if anything did."""

    text: str
    num_tokens: int
    finish: str | None
    error: str | None = None


def head(method: str, path: str, body: bytes) -> bytes:
    """A request up to its body."""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", "connection: close", "content-type: application/json"]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode()


def post(path: str, body: Any) -> bytes:
    """A whole request."""
    data = json.dumps(body).encode()
    return head("POST", path, data) + data


async def ask(port: int, method: str, path: str, body: Any = None) -> Any:
    """The JSON of an answer that is not streamed. Raises OSError if there is none, ValueError if it is no JSON."""
    data = b"" if body is None else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head(method, path, data) + data)
        whole = await reader.read()
    finally:
        await leave(writer)
    return json.loads(whole.partition(b"\r\n\r\n")[2])


async def stream(port: int, path: str, body: Any) -> Outcome:
    """Ask for a stream, and read all of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(post(path, body | {"stream": True, "stream_options": {"include_usage": True}}))
        return gathered([line async for line in reader])
    except OSError as error:
        return Outcome("", 0, None, f"{type(error).__name__}: {error}")
    finally:
        await leave(writer)


def gathered(lines: list[bytes]) -> Outcome:
    """What the lines of a streamed answer say."""
    text, num_tokens, finish = "", 0, None
    events = [line[6:].strip() for line in lines if line.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        return Outcome(text, 0, None, f"the stream has no end; its last line is {lines[-1] if lines else b''!r}")
    for event in events[:-1]:
        found = json.loads(event)
        if "error" in found:
            return Outcome(text, 0, None, found["error"]["message"])
        for choice in found["choices"]:
            text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            finish = choice["finish_reason"] or finish
        num_tokens = (found.get("usage") or {}).get("completion_tokens", num_tokens)
    return Outcome(text, num_tokens, finish)


async def vanish(port: int, data: bytes, seconds: float, *, reset: bool) -> None:
    """Connect, send something, and be gone after a while. reset: as a machine that crashed would."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(seconds):
                await reader.read()
        if reset:
            peer = writer.get_extra_info("socket")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    finally:
        await leave(writer)


async def read_slowly(port: int, data: bytes, num_bytes: int) -> list[bytes]:
    """Ask, read one byte a second through the smallest buffers there are, and at last the rest; returns its lines."""
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    own.setblocking(False)
    await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=own, limit=1024)
    try:
        writer.write(data)
        begun = b""
        for _ in range(num_bytes):
            begun += await reader.read(1)
            await asyncio.sleep(1)
        return (begun + await reader.read()).splitlines(keepends=True)
    finally:
        await leave(writer)


async def until_closed(port: int, data: bytes) -> tuple[float, bytes]:
    """Send something that is no whole request; returns the seconds until the server hangs up, and what it said."""
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        started = loop.time()
        said = await reader.read()
        return loop.time() - started, said
    finally:
        await leave(writer)


async def leave(writer: asyncio.StreamWriter) -> None:
    """Hang up."""
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()

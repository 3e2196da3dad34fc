"""From options to a listening process: the socket, uvicorn, signals.

It does not know routes. The one trick: the port is taken before the model is loaded, so a port in use is told at once,
and listened on after, so nobody connects to a server that cannot answer.

The first SIGTERM or Ctrl-C stops listening and lets running requests end; the second ends those too.
"""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import click
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import OptionError, PilotfishError
from ..llm import LLM
from ..trace import Json, TraceFile, listen
from .app import Server
from .options import ServeOptions

log = logging.getLogger(__name__)
_LOOPBACK = ("127.", "::1")
_BACKLOG = 2048
_LAST_WORDS_SECONDS = 5  # after the drain timeout, for telling every client


def serve(options: ServeOptions, load: Callable[[], LLM]) -> None:
    """Serve until a signal comes. load: makes the LLM, once the port is ours. Raises OptionError for a bad address."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bind(options.host, options.port))
        trace = stack.enter_context(TraceFile(options.trace, append=True)) if options.trace else None
        llm = load()
        if trace is not None:
            _trace(llm, trace)
        server = Server(llm, options)
        _listen(listener)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        click.echo(f"serving {server.model} at http://{shown}:{port}/v1", err=True)
        warn_of_open_door(options, host)
        try:
            _Uvicorn(server).run([listener])
        finally:
            server.close()


def _trace(llm: LLM, file: TraceFile) -> None:
    """Until the file cannot be written: a full disk shall end the trace, not the requests."""

    def take(one: Json) -> None:
        try:
            file.write(one)
        except PilotfishError as error:
            log.error("%s; nothing is traced any more", error)
            llm.engine.witness = None

    listen(llm.engine, llm.tokenizer, take)


def warn_of_open_door(options: ServeOptions, host: str) -> None:
    """Say it if others than this machine can use the server without a key."""
    if not options.api_key and not str(host).startswith(_LOOPBACK):
        click.echo("pilotfish: everybody who reaches this address can use it; --api-key asks for a key", err=True)


def bind(host: str, port: int) -> socket.socket:
    """A socket at this address. Raises OptionError if it cannot be had."""
    try:
        (family, kind, proto, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise OptionError(f"host {host!r} is no address of this machine: {error.strerror}") from error
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _unusable(host, port, error) from None
    return listener


def _listen(listener: socket.socket) -> None:
    """Of two processes that are bound to a port and load their models, the second hears of the other here."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _unusable(host, port, error) from None


def _unusable(host: str, port: int, error: OSError) -> OptionError:
    if error.errno == errno.EADDRINUSE:
        return OptionError(f"port {port} of {host} is in use; choose another with --port (0 takes a free one)")
    return OptionError(f"cannot listen on {host} port {port}: {error.strerror}")


class _Uvicorn(uvicorn.Server):
    """uvicorn with our signals: the first drains, the second stops, and neither is raised again at the end."""

    def __init__(self, server: Server):
        options = server.options

        def protocol(*words: Any, **named: Any) -> H11Protocol:
            return _Protocol(*words, read_timeout=options.read_timeout, **named)

        config = uvicorn.Config(
            server.app,
            http=protocol,  # type: ignore[arg-type]
            ws="none",
            log_level="info" if options.access_log else "warning",
            access_log=options.access_log,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            limit_concurrency=options.max_connections,
            timeout_graceful_shutdown=round(options.drain_timeout + _LAST_WORDS_SECONDS),
        )
        super().__init__(config)
        self._server = server

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        engine = self._server.engine
        if self.should_exit:
            self.force_exit = True
            engine.fail_all()
            return
        self.should_exit = engine.draining = True
        # uvicorn would cancel what is still running, in the midst of a stream and with a traceback for each.
        asyncio.get_running_loop().call_later(self._server.options.drain_timeout, engine.fail_all)
        if engine.num_open:
            click.echo(f"{engine.num_open} completions are ending; once more stops them", err=True)


class _Protocol(H11Protocol):
    """uvicorn's, with a limit on how long a client may take to send a request's header."""

    def __init__(self, *words: Any, read_timeout: float, **named: Any):
        super().__init__(*words, **named)
        self._read_timeout = read_timeout
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """The clock runs from the first byte (or the connection) until a header is complete."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._patience is None:
            self._patience = self.loop.call_later(self._read_timeout, self._give_up)

    def _forget(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

"""The routes: a Starlette application around one engine thread.

It does not know sockets, signals or how text is made. The one trick: `_complete` is the only way to an answer, for
chats and plain completions, streamed or whole: read, check, take a place, tokenize, start, answer; whatever goes wrong
on the way is a `Refusal`, and the place is given back.
"""

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..decoding.grammar import StructuredOutputsParams
from ..errors import OptionError, UserError, unknown_name
from ..llm import LLM
from ..models.words import Spelling
from . import page, tracing
from .answers import Answer, ChatAnswer, Style, TextAnswer
from .bodies import read_body
from .engine_thread import EngineThread, Ticket
from .messages import as_text, turns
from .metrics import CONTENT_TYPE, Metrics
from .openapi import document
from .options import ServeOptions
from .protocol import Chat, Sampling, Text, Tokenize, parse
from .refusals import Json, Refusal, of_user_error
from .streams import EventStream, GoneError, unless_gone
from .structured import blame

log = logging.getLogger(__name__)
Asked = TypeVar("Asked", Chat, Text, Tokenize)
_LONGEST_NAME = 120  # of a model that is not served, in the answer that says so
_GONE = 499  # nginx's word for a client that did not wait
COMPLETIONS: dict[str, type[Chat] | type[Text]] = {"/v1/chat/completions": Chat, "/v1/completions": Text}
OPEN_PATHS = ("/health", "/health/live", "/health/ready", *page.PATHS)


class JSONResponse(Response):
    """Written by pydantic's serialiser, which is fast and makes half surrogates impossible."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


class Server:
    """One model behind HTTP. ``app`` is the ASGI application; its lifespan starts and ends the engine's thread."""

    def __init__(self, llm: LLM, options: ServeOptions | None = None):
        self.llm, self.options = llm, options or ServeOptions()
        self.model = self.options.served_model_name or llm.engine.target.info.name
        self.adapters = llm.engine.target.info.adapters
        if self.model in self.adapters:
            raise OptionError(f"the model and an adapter are both called {self.model!r}; give one another name")
        self.metrics = Metrics(llm, self.model)
        self.engine = EngineThread(
            llm, self.metrics, max_queue=self.options.max_queue, request_timeout=self.options.request_timeout
        )
        self.started = int(time.time())
        self._spelling = Spelling(llm.tokenizer)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="pilotfish-text")  # a long prompt holds up one of them
        self._grammar_pool = ThreadPoolExecutor(1, thread_name_prefix="pilotfish-grammar")
        self.app = Starlette(
            routes=self._routes(),
            lifespan=self._lifespan,
            middleware=[Middleware(_Key, options=self.options)] if self.options.api_key else [],
            exception_handlers={
                Refusal: _refuse,
                HTTPException: _refuse_http,
                UserError: _refuse,
                GoneError: _nobody_there,
                ClientDisconnect: _nobody_there,
                Exception: _apologise,
            },
        )

    def _routes(self) -> list[Route]:
        return [
            *page.routes(),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.one_model),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/health", self.is_ready),
            Route("/health/live", self.is_live),
            Route("/health/ready", self.is_ready),
            Route("/metrics", self.show_metrics),
            Route("/openapi.json", self.openapi),
        ]

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        self.engine.start()
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        """End the threads. Twice does nothing."""
        self.engine.stop()
        for pool in (self._pool, self._grammar_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    # -- completions ---------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """``/v1/chat/completions``."""
        asked = await self._read(request, Chat)
        return await self._complete(request, asked, self._chat_encoders(asked), ChatAnswer)

    async def complete(self, request: Request) -> Response:
        """``/v1/completions``."""
        asked = await self._read(request, Text)
        return await self._complete(request, asked, self._text_encoders(asked), TextAnswer)

    async def answer(self, path: str, body: Any) -> Json:
        """The whole answer to what could be a request's body, without HTTP; in the app's lifespan. Raises Refusal."""
        if path not in COMPLETIONS:
            raise Refusal(400, str(unknown_name("url", path, COMPLETIONS)), param="url")
        asked: Chat | Text = await self._in_pool(functools.partial(COMPLETIONS[path].read, body))
        self._check_model(asked.model)
        if asked.stream:
            raise Refusal(400, "stream: a batch is not streamed; leave it out", param="stream")
        encoders = self._chat_encoders(asked) if isinstance(asked, Chat) else self._text_encoders(asked)
        kind = ChatAnswer if isinstance(asked, Chat) else TextAnswer
        ticket, limit = self._admit(asked, len(encoders))
        try:
            return await _whole(ticket, await self._start(ticket, asked, limit, encoders, kind))
        finally:
            ticket.close()

    def _chat_encoders(self, asked: Chat) -> list[Callable[[], list[int]]]:
        tools = [tool.plain() for tool in asked.offered]
        return [functools.partial(self.llm.chat_prompt, turns(asked.messages), tools=tools or None)]

    def _text_encoders(self, asked: Text) -> list[Callable[[], list[int]]]:
        return [functools.partial(self._encode, prompt) for prompt in asked.prompts]

    def _admit(self, asked: Sampling, num_prompts: int) -> tuple[Ticket, int | None]:
        """Places for the completions, and the most tokens of each. Raises Refusal for what cannot be served."""
        n = asked.n or 1
        most = min(self.options.max_n, self.engine.most_open)
        if n * num_prompts > most:
            told = f"{num_prompts} prompts x n = {n}" if num_prompts > 1 else f"n = {n}"
            raise Refusal(400, f"{told}: this server makes at most {most} completions a request", param="n")
        limit = self._limit(asked)
        asked.params(limit or 1 + (asked.min_tokens or 0))  # what is wrong with them is said before anything is done
        traced = asked.traced
        ticket = self.engine.open(n * num_prompts)
        ticket.traced = traced
        ticket.adapter = asked.model if asked.model in self.adapters else None
        return ticket, limit

    async def _complete(
        self, request: Request, asked: Sampling, encoders: Sequence[Callable[[], list[int]]], kind: type[Answer]
    ) -> Response:
        ticket, limit = self._admit(asked, len(encoders))
        try:
            answer = await unless_gone(request.receive, self._start(ticket, asked, limit, encoders, kind))
            ticket.on_close = tracing.begin(request.headers, ticket.asked, answer)
            if asked.stream:
                return EventStream(ticket, _chunks(ticket, answer))
            whole = JSONResponse(await unless_gone(request.receive, _whole(ticket, answer)))
        except BaseException:
            ticket.close()
            raise
        ticket.close()
        return whole

    async def _start(
        self,
        ticket: Ticket,
        asked: Sampling,
        limit: int | None,
        encoders: Sequence[Callable[[], list[int]]],
        kind: type[Answer],
    ) -> Answer:
        if wish := asked.wish():
            await self._compile(*wish)
        prompts = [await self._in_pool(encode) for encode in encoders]
        reference: list[int] = []
        if asked.prediction:
            hint = as_text(asked.prediction.content)
            reference = await self._in_pool(functools.partial(self._encode, hint, special=False)) if hint else []
        params = asked.params(limit or self._room(prompts))
        await ticket.start(prompts, params, reference)
        style = Style(
            logprobs=params.logprobs is not None,
            one_by_one=(asked.stream_granularity or self.options.stream_granularity) == "token",
            usage=asked.ends_with_usage,
            usage_so_far=asked.counts_usage,
            metrics=self.options.per_request_spec_decode_metrics,
            calls=isinstance(asked, Chat) and bool(asked.offered),
        )
        return kind(ticket.adapter or self.model, ticket.num_choices, sum(map(len, prompts)), self._spelling, style)

    def _limit(self, asked: Sampling) -> int | None:
        """The most tokens of an answer. Raises Refusal if the client wants more than the server gives."""
        most = self.options.max_completion_tokens
        if most is not None and asked.limit is not None and asked.limit > most:
            raise Refusal(400, f"max_tokens {asked.limit}: this server gives at most {most}", param="max_tokens")
        return asked.limit if asked.limit is not None else most

    def _room(self, prompts: Sequence[Sequence[int]]) -> int:
        """What context and page pool leave for an answer; at least 1, so that the engine says what is too long."""
        engine = self.llm.engine
        longest = max(len(engine.target.info.opening(prompt)[1]) for prompt in prompts)
        return max(1, min(engine.max_length, engine.cache.capacity) - longest)

    # -- the rest ------------------------------------------------------------------------------------------------

    async def models(self, _request: Request) -> Response:
        """``/v1/models``."""
        return JSONResponse({"object": "list", "data": [self._card(name) for name in (self.model, *self.adapters)]})

    async def one_model(self, request: Request) -> Response:
        """``/v1/models/NAME``."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card(request.path_params["name"]))

    def _card(self, name: str) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "pilotfish",
            "root": self.llm.engine.target.info.name,
            "parent": self.model if name in self.adapters else None,
            "max_model_len": self.llm.engine.max_length,
        }

    async def tokenize(self, request: Request) -> Response:
        """``/tokenize``."""
        asked = await self._read(request, Tokenize)
        if asked.messages is not None:
            ids = await self._in_pool(functools.partial(self.llm.chat_prompt, turns(asked.messages)))
        else:
            assert asked.prompt is not None
            ids = await self._in_pool(functools.partial(self._encode, asked.prompt, special=asked.add_special_tokens))
        names = [self._spelling.spell(token)[0] for token in ids] if asked.return_token_strs else None
        answer = {"count": len(ids), "max_model_len": self.llm.engine.max_length, "tokens": ids, "token_strs": names}
        return JSONResponse(answer)

    async def is_live(self, _request: Request) -> Response:
        """``/health/live``: whether the process answers."""
        return JSONResponse({"status": "live"})

    async def is_ready(self, _request: Request) -> Response:
        """``/health`` and ``/health/ready``: whether new requests are taken."""
        ready = self.engine.ready
        return JSONResponse({"status": "ready" if ready else "not ready"}, status_code=200 if ready else 503)

    async def show_metrics(self, _request: Request) -> Response:
        """``/metrics``."""
        return Response(self.metrics.page(), media_type=CONTENT_TYPE)

    async def openapi(self, _request: Request) -> Response:
        """``/openapi.json``."""
        key, protect_metrics = self.options.api_key is not None, self.options.protect_metrics
        return JSONResponse(document(self.model, key=key, protect_metrics=protect_metrics))

    # -- reading -------------------------------------------------------------------------------------------------

    async def _read(self, request: Request, kind: type[Asked]) -> Asked:
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json":  # a web page may send anything else to this port without asking its user
            raise Refusal(415, f"send content-type application/json, not {media or 'nothing'!r}")
        asked: Asked = await self._in_pool(functools.partial(_parse, kind, await read_body(request, self.options)))
        self._check_model(asked.model)
        return asked

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in (self.model, *self.adapters):
            shown = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."
            served = ", ".join(map(repr, (self.model, *self.adapters)))
            message = f"the model {shown!r} is not served here; {served} {'are' if self.adapters else 'is'}"
            raise Refusal(404, message, param="model", code="model_not_found")

    def _encode(self, prompt: str | list[int], *, special: bool = True) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        if self.llm.tokenizer is None:
            raise Refusal(400, "this model has no tokenizer: give prompts as token ids", param="prompt")
        return self.llm.tokenizer.encode(prompt, add_special_tokens=special)

    async def _in_pool(self, work: Callable[[], Any]) -> Any:
        """Work on texts, which may be long, beside the event loop. Raises Refusal for what the core refuses."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except UserError as error:
            raise of_user_error(error) from error

    async def _compile(self, field: str, wanted: StructuredOutputsParams) -> None:
        """A grammar, in a thread of its own: some take seconds until they are refused, and nobody else shall wait."""
        work = functools.partial(self.llm.engine.grammars.prepare, wanted)
        try:
            await asyncio.get_running_loop().run_in_executor(self._grammar_pool, work)
        except OptionError as error:
            raise blame(field, error) from error
        except UserError as error:
            raise of_user_error(error) from error


def _parse(kind: type[Asked], body: bytes) -> Asked:
    return kind.read(parse(body))


async def _chunks(ticket: Ticket, answer: Answer) -> AsyncGenerator[list[Json]]:
    yield answer.opening()
    async for delta in ticket.deltas():
        yield answer.take(delta)
    yield answer.closing()


async def _whole(ticket: Ticket, answer: Answer) -> Json:
    async for delta in ticket.deltas():
        answer.take(delta)
    return answer.whole()


# -- errors and keys -----------------------------------------------------------------------------------------------


def _answer(refusal: Refusal) -> Response:
    return JSONResponse(refusal.body, status_code=refusal.status, headers=refusal.headers)


# Starlette would run a handler that is not async in a thread of its own.
async def _refuse(_request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal | UserError)
    return _answer(error if isinstance(error, Refusal) else of_user_error(error))


async def _nobody_there(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_GONE)


async def _apologise(_request: Request, _error: Exception) -> Response:
    """Starlette raises the error again behind this answer, and so it gets into the log."""
    return _answer(Refusal(500, "the request failed; the server's log says why"))


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = {404: f"there is nothing at {request.url.path}", 405: f"{request.method} is not for {request.url.path}"}
    response = _answer(Refusal(error.status_code, told.get(error.status_code, str(error.detail))))
    response.headers.update(error.headers or {})
    return response


class _Key:
    """Asks for the API key before anything of a request is looked at; compares in constant time."""

    def __init__(self, app: ASGIApp, options: ServeOptions):
        assert options.api_key
        self.app, self.key = app, options.api_key.encode()
        self.open = (*OPEN_PATHS, *(() if options.protect_metrics else ("/metrics",)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self.open and not self._knows(scope):
            refusal = Refusal(401, "the API key is missing or wrong: send Authorization: Bearer KEY")
            await _answer(refusal)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, key = (given[0] if given else b"").partition(b" ")
        return secrets.compare_digest(key.strip(), self.key) and kind.lower() == b"bearer"

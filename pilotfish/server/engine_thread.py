"""The engine's own thread, and tickets: how the event loop asks for completions and hears of them.

It does not know HTTP or JSON. The one trick: the engine is touched by one thread only. Whatever the event loop wants
(add, abort, stop) is a call in a queue that is emptied before each step; what a step did goes back as one call per
step. So a client that leaves is forgotten within a step, and a client that reads slowly delays nobody: its deltas wait
in its own ticket, never more of them than its answer has tokens.

    event loop    ticket = open() -> start() -> deltas ... -> close()
                        |  _commands (SimpleQueue)     ^  call_soon_threadsafe, once a step
    engine thread       v  add, abort                  |  Engine.step
"""

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ..decoding.request import FinishReason, Request, SpeculationStats, TokenLogprob
from ..decoding.sampling import SamplingParams
from ..engine.engine import Event
from ..errors import UserError
from ..llm import LLM
from ..models.tokenizer import Detokenizer
from .passes import Pass, plain_seconds
from .refusals import Refusal, of_user_error

log = logging.getLogger(__name__)
_LONGEST_RETRY = 60  # seconds


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step did for one completion; fields as in `Event`, and nothing that changes any more.

    choice: which of the ticket's completions. logprobs: one per token, if asked for. The last one has the finish
    reason, what met it, and the completion's statistics. passed: the pass itself, if the request asked to see it.
    """

    choice: int
    tokens: tuple[int, ...] = ()
    pieces: tuple[str, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    stats: SpeculationStats | None = None
    passed: Pass | None = None


Item = Delta | Exception | None  # None: the completions are queued


class Watch(Protocol):
    """Counts what happens; called on the engine's thread. `pilotfish.server.metrics.Metrics` is one."""

    def added(self, num_prompt_tokens: int) -> None:
        """A completion began."""

    def stepped(self, event: Event, seconds: float, first: bool) -> None:
        """Tokens came, ``seconds`` after the completion's last ones or, for the first, after it was asked for."""

    def finished(self, reason: FinishReason, seconds: float) -> None:
        """A completion ended, ``seconds`` after it was asked for."""


@dataclass(slots=True)
class _Open:
    """What the engine's thread knows of a request under way."""

    request: Request
    ticket: "Ticket"
    choice: int
    last: float  # when it was asked for, or last emitted
    begun: bool = False


@dataclass(slots=True, eq=False)
class Ticket:
    """One HTTP request's completions, on the event loop: `start`, iterate over its deltas, `close` in any case.

    traced: set before `start`, each delta tells of its pass. adapter: set before `start`, it writes.
    """

    thread: "EngineThread"
    num_choices: int
    deadline: float  # of the event loop's clock
    asked: float = field(default_factory=time.perf_counter)
    num_open: int = field(init=False)
    closed: bool = False
    traced: bool = False
    adapter: str | None = None
    on_close: Callable[[], None] | None = None
    inbox: "asyncio.Queue[Item]" = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.num_open = self.num_choices

    async def start(self, prompts: Sequence[Sequence[int]], params: SamplingParams, reference: Sequence[int]) -> None:
        """Queue ``params.n`` completions of each prompt. Raises Refusal for what the engine refuses."""
        assert len(prompts) * params.n == self.num_choices
        self.thread.post(partial(self.thread.add, self, prompts, params, reference))
        await self._next()

    async def deltas(self) -> AsyncIterator[Delta]:
        """All deltas of all completions, as they come. Raises Refusal if one fails or the time is over."""
        while self.num_open or not self.inbox.empty():
            delta = await self._next()
            assert delta is not None
            yield delta

    async def _next(self) -> Delta | None:
        try:
            async with asyncio.timeout_at(self.deadline):
                item = await self.inbox.get()
        except TimeoutError:
            raise Refusal(504, "the request took longer than this server allows", code="timeout") from None
        if isinstance(item, UserError):
            raise of_user_error(item)
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        """Give up what is not finished; its pages are free within a step."""
        if not self.closed:
            self.closed = True
            if self.num_open:
                self.thread.post(partial(self.thread.abort, self))
            self.thread.num_open -= self.num_open
            self.num_open = 0
            if self.on_close:
                self.on_close()

    def receive(self, item: Item) -> None:
        """From the engine's thread, by way of the event loop."""
        if self.closed:
            return
        if isinstance(item, Delta) and item.finish:
            self.num_open -= 1
            self.thread.num_open -= 1
            self.thread.learn(time.perf_counter() - self.asked)
        self.inbox.put_nowait(item)


class EngineThread:
    """Owns an LLM's engine. max_queue: completions that may wait beyond those that can run."""

    def __init__(self, llm: LLM, watch: Watch, *, max_queue: int, request_timeout: float):
        self.llm, self.engine, self.watch = llm, llm.engine, watch
        self.most_open = llm.engine.options.max_num_seqs + max_queue
        self.request_timeout = request_timeout
        self.num_open = 0  # completions asked for and not finished; the event loop's own number
        self.draining = False
        self._typical_seconds = 1.0  # of a completion, from asked to finished
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: dict[str, _Open] = {}
        self._stopping = self._refusing = self._ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="pilotfish-engine", daemon=True)

    # -- on the event loop ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin; call it on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End after the step under way, and wait for that. What is open fails."""
        self.post(self._stop)
        if self._thread.is_alive():
            self._thread.join()

    @property
    def ready(self) -> bool:
        return self._thread.is_alive() and not self.draining

    def open(self, num_choices: int) -> Ticket:
        """Take places for completions. Raises Refusal: 429 if there are too many, 503 if the server is ending."""
        if not self.ready:
            raise Refusal(503, "the server is ending; ask another one", code="shutting_down", retry_after=1)
        if self.num_open + num_choices > self.most_open:
            rounds = math.ceil(self.num_open / self.engine.options.max_num_seqs)
            seconds = min(_LONGEST_RETRY, max(1, round(rounds * self._typical_seconds)))
            message = f"{self.num_open} completions are running or waiting, and this server takes {self.most_open}"
            raise Refusal(429, f"{message}; try again in {seconds} s", code="queue_full", retry_after=seconds)
        self.num_open += num_choices
        return Ticket(self, num_choices, asyncio.get_running_loop().time() + self.request_timeout)

    def learn(self, seconds: float) -> None:
        """How long a completion took; a client that is sent away is told to come back after about that."""
        self._typical_seconds += 0.1 * (seconds - self._typical_seconds)

    def post(self, command: Callable[[], None]) -> None:
        """Have the engine's thread do something before its next step. Safe in a signal handler too."""
        self._commands.put(command)
        if self._ended:
            self._obey_the_rest()

    def fail_all(self) -> None:
        """End everything at once, and whatever may still come: a second signal came."""
        self.post(self._refuse_all)

    # -- on the engine's thread ----------------------------------------------------------------------------------

    def add(
        self, ticket: Ticket, prompts: Sequence[Sequence[int]], params: SamplingParams, reference: Sequence[int]
    ) -> None:
        """Queue a ticket's completions; says None when they are, or why they cannot be."""
        if self._refusing:
            self._tell([(ticket, _stopped())])
            return
        requests: list[Request] = []
        tokenizer = self.llm.tokenizer
        stream = None if tokenizer is None else partial(Detokenizer, tokenizer)
        try:
            for prompt in prompts:
                requests += self.engine.add(
                    prompt,
                    params,
                    text_stream=stream,
                    reference=reference,
                    traced=ticket.traced,
                    adapter=ticket.adapter,
                )
        except Exception as error:
            for request in requests:
                self.engine.abort(request)
            if not isinstance(error, UserError):
                log.exception("a request failed before it began")
                error = Refusal(500, "the request failed; the server's log says why")
            self._tell([(ticket, error)])
            return
        for choice, request in enumerate(requests):
            self._open[request.id] = _Open(request, ticket, choice, ticket.asked)
            self.watch.added(request.num_read)
        self._tell([(ticket, None)])

    def abort(self, ticket: Ticket) -> None:
        """Forget a ticket's completions; nobody listens any more."""
        for one in [one for one in self._open.values() if one.ticket is ticket]:
            self.engine.abort(one.request)
            self._close(one, FinishReason.ABORT)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._obey()
                if self.engine.has_work and not self._stopping:
                    self._step()
        finally:  # if this is our own mistake, nobody shall wait for ever
            self._refuse_all()
            # Whoever posts from now on sees this, and what was posted before is met below: no command is left lying.
            self._ended = True
            self._obey_the_rest()
            self.llm.remember_gain()

    def _obey(self) -> None:
        """All commands that are there; waits for one if there is nothing else to do."""
        if not self.engine.has_work:
            if self._commands.empty():
                self.llm.remember_gain()
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _obey_the_rest(self) -> None:
        """Commands that nobody waits for on the engine's thread, which has ended: requests hear that it has."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    def _refuse_all(self) -> None:
        self._refusing = True
        self._fail(None, _stopped())

    def _stop(self) -> None:
        self._stopping = True

    def _step(self) -> None:
        started = time.perf_counter()
        try:
            events = self.engine.step()
        except Exception:
            # Which request did it cannot be known; those that wait go on. Each failure ends one at least.
            log.exception("a pass failed, and the requests in it with it")
            scheduler = self.engine.scheduler
            self._fail(scheduler.running or list(scheduler.waiting)[:1], Refusal(500, "the pass failed"))
            return
        now = time.perf_counter()
        told: list[tuple[Ticket, Item]] = []
        num_emitting = sum(bool(event.tokens) for event in events)
        for event in events:
            one = self._open.get(event.request.id)
            if one is None or not (event.tokens or event.finish):
                continue
            passed = None
            if event.tokens:
                if one.ticket.traced:
                    plain = plain_seconds(self.engine, num_emitting)
                    passed = Pass(event.guess, now - one.last, now - started, plain)
                self.watch.stepped(event, now - one.last, not one.begun)
                one.last, one.begun = now, True
            told.append((one.ticket, self._delta(one, event, passed)))
            if event.finish:
                self._close(one, event.finish)
        self._tell(told)

    def _delta(self, one: _Open, event: Event, passed: Pass | None) -> Delta | Refusal:
        request = one.request
        if event.finish is FinishReason.ERROR:
            return Refusal(500, request.error or "the request failed")
        return Delta(
            one.choice,
            event.tokens,
            event.pieces,
            event.num_drafted,
            event.num_accepted,
            tuple(request.logprobs[len(request.logprobs) - len(event.tokens) :]) if request.logprobs else (),
            event.finish,
            request.stop_reason,
            request.stats if event.finish else None,
            passed,
        )

    def _fail(self, requests: Sequence[Request] | None, error: Refusal) -> None:
        """End requests (None: all) with an error that their clients hear of."""
        ended = [one for one in self._open.values() if requests is None or one.request in requests]
        for one in ended:
            self.engine.abort(one.request, FinishReason.ERROR)
            self._close(one, FinishReason.ERROR)
        self._tell([(one.ticket, error) for one in ended])

    def _close(self, one: _Open, reason: FinishReason) -> None:
        del self._open[one.request.id]
        self.watch.finished(reason, time.perf_counter() - one.ticket.asked)

    def _tell(self, told: "Sequence[tuple[Ticket, Item]]") -> None:
        assert self._loop is not None
        if told:
            try:
                self._loop.call_soon_threadsafe(_hand_out, told)
            except RuntimeError:
                if not self._loop.is_closed():  # else the server has ended, and nobody is there to be told
                    raise


def _stopped() -> Refusal:
    return Refusal(503, "the server was stopped", code="shutting_down")


def _hand_out(told: Sequence[tuple[Ticket, Item]]) -> None:
    for ticket, item in told:
        ticket.receive(item)

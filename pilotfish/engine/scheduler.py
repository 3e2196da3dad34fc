"""Scheduler: who runs in the next pass, with how many rows, and how many nodes each may draft. Holds no tensors.

It does not know models, drafters or sampling. The one trick: there are no phases. A request has tokens and the cache
has rows; the plan closes the gap, as far as the budget of rows allows. A new prompt, a chunk of one, a prefix hit, a
preempted request and a pending token are the same case.

Page pressure: first drafts shrink to nothing, then the youngest request gives its pages back and waits (its pages
stay findable, so coming back is often cheap). The oldest request always gets on, so the whole always does.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..decoding.draft import Draft, ancestors
from ..decoding.request import Request
from ..errors import CapacityError
from ..paged.batch import Feed
from ..paged.cache import KVCache
from .options import EngineOptions


@dataclass(frozen=True, slots=True)
class Entry:
    """One request's part of a pass: rows tokens[past : past + num_trunk], then up to ``limit`` draft nodes."""

    request: Request
    past: int
    num_trunk: int
    limit: int = 0

    @property
    def caught_up(self) -> bool:
        """Whether the pending token is among the rows, so that something will be emitted."""
        return self.past + self.num_trunk == len(self.request.tokens)

    def feed(self, draft: Draft) -> Feed:
        """The rows of this entry. A chain simply prolongs the trunk."""
        tokens = [*self.request.tokens[self.past : self.past + self.num_trunk], *draft.tokens]
        sets = () if draft.is_chain else ancestors(draft.parents)
        return Feed(self.request.id, tokens, self.past, len(draft) + 1 if self.caught_up else 0, sets)


@dataclass(frozen=True, slots=True)
class Plan:
    """One pass. ``entries`` are in order of arrival."""

    entries: list[Entry] = field(default_factory=list)

    @property
    def drafting(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.limit > 0]


class Scheduler:
    """limits_of(requests) are the most nodes wanted for each now; the scheduler may grant fewer, down to 0."""

    def __init__(self, cache: KVCache, options: EngineOptions, limits_of: Callable[[Sequence[Request]], Sequence[int]]):
        self.cache, self.options, self.limits_of = cache, options, limits_of
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, request: Request) -> None:
        """Queue a request. Raises CapacityError if the whole pool could not hold it alone."""
        longest = min(request.num_prompt + request.params.max_tokens, request.max_length)
        if longest > self.cache.capacity:
            raise CapacityError(
                f"a prompt of {request.num_prompt} tokens and max_tokens {request.params.max_tokens} need {longest} "
                f"rows, and the page pool holds {self.cache.capacity}; raise num_pages (or kv_cache_memory), or lower "
                "max_tokens"
            )
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request and free its pages."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.cache.release(request.id)

    def plan(self) -> Plan:
        """Decide the next pass and reserve its pages."""
        plan, budget = Plan(), self.options.max_num_batched_tokens
        preemptions = self.num_preemptions
        running = list(self.running)
        # Whatever the first ones draft, everybody behind them gets a row, those who wait for a free seat included.
        num_served = min(len(running) + len(self.waiting), self.options.max_num_seqs)
        for i, (request, wanted) in enumerate(zip(running, self.limits_of(running) if running else (), strict=True)):
            left = budget - (num_served - 1 - i)
            if request in self.running and (entry := self._grant(request, left, wanted)):  # else just preempted
                plan.entries.append(entry)
                budget -= entry.num_trunk + entry.limit
        while budget > 0 and self.num_preemptions == preemptions and (entry := self._admit(budget)):
            plan.entries.append(entry)
            budget -= entry.num_trunk + entry.limit
        return plan

    def _grant(self, request: Request, budget: int, wanted: int) -> Entry | None:
        past = self.cache.length(request.id)
        num_trunk = min(len(request.tokens) - past, budget)
        limit = 0
        if past + num_trunk == len(request.tokens):
            limit = max(0, min(wanted, request.room - 1, budget - num_trunk))
        while not self.cache.reserve(request.id, num_trunk + limit):
            if limit:
                limit = 0
            else:
                youngest = self.running[-1]
                self._preempt(youngest)
                if youngest is request:
                    return None
        return Entry(request, past, num_trunk, limit)

    def _admit(self, budget: int) -> Entry | None:
        """The first waiting request, if there is a seat and its whole text fits into the free pages."""
        if not self.waiting or len(self.running) >= self.options.max_num_seqs:
            return None
        request = self.waiting[0]
        found = self.cache.open(request.id, request.tokens, request.source, request.adapter)
        if not self.cache.reserve(request.id, len(request.tokens) - found):
            self.cache.release(request.id)
            return None
        self.waiting.popleft()
        self.running.append(request)
        (wanted,) = self.limits_of([request])
        return self._grant(request, budget, wanted)

    def _preempt(self, request: Request) -> None:
        self.cache.release(request.id)
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def check(self) -> None:
        """Integrity, for tests: a caught-up request's rows are all its tokens but the pending one."""
        self.cache.check()
        ids: Sequence[str] = [request.id for request in self.running]
        assert set(ids) == set(self.cache.sequences), "open sequences are the running requests"
        for request in self.running:
            assert self.cache.length(request.id) < len(request.tokens)

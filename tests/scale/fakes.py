"""A server's engine of fixed latency for replicas, and replicas without Ray that die on demand.

They know the interfaces of `pilotfish.scale`. The one trick: a pass of the engine sleeps, so two engines are twice as
fast as one on however few cores.
"""

import contextlib
import time
from dataclasses import dataclass
from typing import Any

from pilotfish import LLM
from pilotfish.scale.front import BusyError, LostError
from pilotfish.scale.replica import Replica
from pilotfish.server.options import ServeOptions
from tests.server.fakes import an_llm, singer

NUM_SEATS = 4


@dataclass(frozen=True)
class Slow:
    """Makes an LLM whose passes take so many seconds, however many completions are in them."""

    seconds: float = 0.0
    num_seats: int = NUM_SEATS

    def make(self) -> LLM:
        model = singer(context=4096)
        fast = model.forward

        def forward(*words: Any, **named: Any) -> Any:
            time.sleep(self.seconds)
            return fast(*words, **named)

        model.forward = forward  # type: ignore[method-assign]
        return an_llm(model, method="none", max_num_seqs=self.num_seats, num_pages=2000)


class Local:
    """`front.Replicas` in this process. lost_after: for each ask to come, how many lists of messages until its replica
    dies (None: it lives). asked: how often, and with which name of a conversation."""

    def __init__(self, options: ServeOptions | None = None, *, seconds: float = 0.0):
        self.replica = Replica(Slow(seconds), options or ServeOptions())
        self.lost_after: list[int | None] = []
        self.asked: list[str | None] = []
        self.busy = False

    async def ask(self, request: Any, body: bytes, conversation: str | None) -> Any:
        self.asked.append(conversation)
        if self.busy:
            raise BusyError
        left = self.lost_after.pop(0) if self.lost_after else None
        async with contextlib.aclosing(self.replica.ask(request, body)) as messages:
            async for some in messages:
                if left is not None:
                    if not left:
                        raise LostError("killed")
                    left -= 1
                yield some
        if left is not None:
            raise LostError("killed at the end")

    async def metrics(self) -> dict[str, str]:
        return {"a": self.replica.metrics(), "b": self.replica.metrics()}

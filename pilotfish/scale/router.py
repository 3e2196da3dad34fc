"""Ray Serve's router for our replicas: a conversation goes to its home, unless it would wait there, and less elsewhere.

It does not know what a conversation is: `routing` names it, and the name comes as Serve's session id. The one trick:
it only ranks; asking replicas how full they are, waiting and trying again is Serve's own code.
"""

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import RequestRouter

from .routing import home, refuges


class ConversationRouter(RequestRouter):  # type: ignore[misc]
    """num_seats: requests that one replica works on at once; a further one would wait there."""

    def initialize_state(self, num_seats: int = 1) -> None:
        """Called by Serve with ``request_router_kwargs``."""
        self._num_seats = num_seats

    async def choose_replicas(self, candidate_replicas: Sequence[Any], pending_request: Any = None) -> list[list[Any]]:
        """Ranks of replicas; of a rank, Serve takes the least loaded that has room."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # where all are full
        name = pending_request.metadata.session_id if pending_request is not None else ""
        if not name or len(candidate_replicas) < 2:
            return [list(candidate_replicas)]
        by_id = {one.replica_id.unique_id: one for one in candidate_replicas}
        own = home(name, by_id)
        loads = {short: self.replica_queue_len_cache.get(one.replica_id) for short, one in by_id.items()}
        first = refuges(loads, own, self._num_seats) or [own]
        return [[by_id[short] for short in first], [one for short, one in by_id.items() if short not in first]]

"""No drafting: plain decoding, through the same loop. It is also what every other drafter is measured against."""

from collections.abc import Sequence

from ..decoding.draft import EMPTY, Draft
from ..decoding.request import Request
from .base import Drafter


class NoDrafter(Drafter):
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        return [EMPTY] * len(requests)

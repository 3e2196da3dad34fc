"""Several drafters in order: for each request, the first one that has an idea drafts.

It does not know its members. The one trick: the next one is asked only for the requests that the ones before had
nothing for, so a cheap drafter in front of a dear one saves the dear one's time; which one drafts depends on the text
so far alone, never on what was drawn, so nothing is biased. All members see everything that was kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..decoding.draft import EMPTY, MAX_NODES, Draft
from ..decoding.request import Request, Step
from ..errors import OptionError
from . import registry
from .base import Drafter, Setting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class FirstOfOptions:
    """Raises OptionError for an empty list, unknown methods, and methods that cannot be members."""

    drafters: Any = field(
        default="suffix,ngram",
        metadata={"help": "methods in order: names with commas between, or a JSON list of configs"},
    )

    def __post_init__(self) -> None:
        names = [one.method for one in registry.members(self.drafters, "drafters")]
        if "first_of" in names:
            raise OptionError("first_of cannot be one of its own drafters: put the inner list's drafters in its place")
        if "none" in names:
            raise OptionError("'none' never drafts, so it has no place among drafters: leave it out")


class FirstOfDrafter(Drafter):
    """limits: per member, the most tokens it may draft; None: no bounds of their own."""

    Options = FirstOfOptions

    def __init__(self, members: Sequence[Drafter], limits: Sequence[int] | None = None):
        self.members = tuple(members)
        self.limits = tuple(limits) if limits is not None else (MAX_NODES,) * len(self.members)
        self.trees = any(drafter.trees for drafter in self.members)
        self.taps = tuple(sorted({layer for drafter in self.members for layer in drafter.taps}))

    @classmethod
    def build(cls, options: Any, setting: Setting) -> FirstOfDrafter:
        found = registry.members(options.drafters, "drafters")
        return cls([one.build(setting) for one in found], [int(one.common.num_speculative_tokens) for one in found])

    @property
    def arms(self) -> Sequence[tuple[Drafter, int]]:
        return tuple(
            (arm, min(most, limit))
            for drafter, limit in zip(self.members, self.limits, strict=True)
            for arm, most in drafter.arms
        )

    def describe(self) -> str:
        return ", else ".join(registry.method_of(drafter) for drafter in self.members)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        drafts = [EMPTY] * len(requests)
        for number, (drafter, most) in enumerate(zip(self.members, self.limits, strict=True)):
            waiting = [i for i, draft in enumerate(drafts) if not len(draft)]
            if not waiting:
                break
            proposed = drafter.propose([requests[i] for i in waiting], [min(limits[i], most) for i in waiting])
            for i, draft in zip(waiting, proposed, strict=True):
                drafts[i] = replace(draft, kind=(number, draft.kind))
        return drafts

    def observe(self, steps: Sequence[Step], taps: Mapping[int, Tensor]) -> None:
        for drafter in self.members:
            drafter.observe(steps, taps)

    def release(self, request: Request) -> None:
        for drafter in self.members:
            drafter.release(request)

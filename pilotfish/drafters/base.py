"""What a drafter owes the engine: guesses, and nothing more.

A drafter can be wrong or slow; it can never change or fail a request. It does not see the acceptance rule; it sees
requests (read only), says what might come next, and is told what was kept. Most never touch the target either.

To add one: a file in this folder, named after the method, with one `Drafter` subclass whose `Options` is a frozen
dataclass. The registry, the command line and the conformance suite find it by themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..decoding.draft import MAX_NODES, Draft
from ..decoding.request import Request, Step

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..models.base import CausalLM, ModelInfo
    from ..models.tokenizer import Tokenizer
    from ..paged.cache import KVCache


@dataclass(frozen=True, slots=True)
class NoOptions:
    """For drafters without any."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a drafter will work: the target and the engine's bounds.

    model, cache: the target itself and its pages, for drafters that draft with it. They may write rows only behind a
        sequence's length, and no more than the limit given to `Drafter.propose`; verification overwrites them.
    tokenizer: the target's, None if it has none. max_length: longest text. max_num_seqs: requests at once.
    max_rows: rows one pass may have. trees: whether drafts may branch here.
    """

    target: ModelInfo
    model: CausalLM
    cache: KVCache
    tokenizer: Tokenizer | None
    max_length: int
    max_num_seqs: int
    page_size: int
    max_rows: int
    num_cache_tokens: int
    device: torch.device
    trees: bool = True


class Drafter(ABC):
    """Base of all drafters. Only `propose` is mandatory."""

    Options: ClassVar[type[Any]] = NoOptions
    trees: bool = False  # whether drafts may branch
    encoder_decoder: bool = True  # whether it can draft for encoder-decoder targets too
    cost_grows: bool = False  # whether longer drafts take longer; asked where drafts carry chances: most are look-ups
    level_cost: float = 0.0  # of a pass of its own in plain passes of the target, as the engine measured it
    taps: Sequence[int] = ()  # target layers whose hidden states `observe` wants

    @classmethod
    def build(cls, options: Any, setting: Setting) -> Drafter:
        """A drafter for this setting. Raises DraftError if it does not fit the target, saying why."""
        return cls()

    @property
    def arms(self) -> Sequence[tuple[Drafter, int]]:
        """The drafters that the engine asks in turn, the next one where those before had nothing (or nothing that
        pays), and the most nodes of each. Usually this one alone."""
        return ((self, MAX_NODES),)

    @abstractmethod
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        """One draft per request, of at most ``limits[i]`` >= 1 nodes; `EMPTY` where there is no idea.

        What is remembered of a request from call to call must come from its first ``num_settled`` tokens: the rest,
        if any, may be other tokens next time. What was drawn is handed out: an exception, or fewer tokens, because of
        what was drawn would bias the text.
        """

    def observe(self, steps: Sequence[Step], taps: Mapping[int, Tensor]) -> None:  # noqa: B027
        """What the pass kept, for every request that was in it, the target's cache included.

        taps: per layer [T, hidden], the rows of the steps end to end, ``step.num_rows`` each.
        """

    def release(self, request: Request) -> None:  # noqa: B027
        """The request is over: forget it."""

    def describe(self) -> str:
        """A few words for the start-up line."""
        return ""

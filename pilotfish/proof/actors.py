"""The parts the proof plays itself: a witness beside any drafter, a draft model known to be askew, and a liar.

None of them knows what is concluded from it. The one trick: the askew draft is the target with bent logits, so there
is a sampled drafter of useful quality for every target, without a second model; and the liar is the same drafter,
except that it reports another law than it draws from, which no exact rule can survive.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..decoding.draft import EMPTY, Draft, chain
from ..decoding.request import Request, Step
from ..drafters.base import Drafter
from ..models.base import CausalLM, Ends, ModelOutput
from ..paged.batch import Batch
from ..paged.cache import KVCache

_FLATTER = 1.5  # the askew law's temperature
_BUMP = 1.0  # and how far it moves single tokens up and down


class Witness(Drafter):
    """Any drafter, its latest drafts kept until they are taken."""

    def __init__(self, drafter: Drafter):
        self.drafter, self.taps, self.trees = drafter, drafter.taps, drafter.trees
        self._latest: dict[str, Draft] = {}

    def take(self, request: Request) -> Draft:
        """What was last proposed for this request, before the engine cut it; empty if nothing was."""
        return self._latest.pop(request.id, EMPTY)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        drafts = self.drafter.propose(requests, limits)
        self._latest |= {request.id: draft for request, draft in zip(requests, drafts, strict=True)}
        return drafts

    def observe(self, steps: Sequence[Step], taps: Mapping[int, Tensor]) -> None:
        self.drafter.observe(steps, taps)

    def release(self, request: Request) -> None:
        self.drafter.release(request)


class AskewLM:
    """A model with other laws than ``model``, of the same support only by chance: flatter, and bumpy by token id."""

    def __init__(self, model: CausalLM):
        self.model, self.info = model, model.info
        self._bumps_V = torch.sin(torch.arange(model.info.vocab_size, device=model.info.device) * 1.7) * _BUMP

    def new_cache(self, num_pages: int, page_size: int = 16) -> KVCache:
        return self.model.new_cache(num_pages, page_size)

    def ends(self) -> Ends:
        return self.model.ends()

    def forward(
        self, batch: Batch, cache: KVCache, *, taps: Sequence[int] = (), layers: Sequence[int] | None = None
    ) -> ModelOutput:
        output = self.model.forward(batch, cache, taps=taps, layers=layers)
        logits_NV = output.logits_NV / _FLATTER + self._bumps_V.to(output.logits_NV.dtype)
        return ModelOutput(logits_NV, output.taps)


class Liar(Witness):
    """Draws from its drafter's law q and reports norm(q^2): a q that is not the law the token was drawn from."""

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        drafts = super().propose(requests, limits)
        return [draft if draft.probs is None else chain(draft.tokens, _sharpen(draft.probs)) for draft in drafts]


def _sharpen(q_NV: Tensor) -> Tensor:
    squared_NV = q_NV.square()
    return squared_NV / squared_NV.sum(1, keepdim=True)

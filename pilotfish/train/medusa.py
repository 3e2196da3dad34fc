"""Learning to draft as Medusa-1 does: the target and its output matrix stay as they are (Cai et al. 2024, section 3.1).

It does not know where lessons come from. The one trick: only the small layers in front of the output matrix learn, so a
row costs one product with that matrix forwards and one back, and nothing of the target is ever held for a gradient.
"""

import torch
from torch import Tensor

from ..heads.medusa import MedusaConfig, MedusaHeads
from ..models.base import CausalLM
from .lessons import Laws, Pack, chunks, padded
from .losses import Tally, judge
from .options import Loss, MedusaOptions

_CHUNK = 256  # rows, each with the logits of all heads


class MedusaTask:
    """Heads and how they learn. num_positions: as many as there are heads."""

    def __init__(self, head: MedusaHeads, options: MedusaOptions):
        self.head, self.options = head, options
        self.num_positions = options.num_heads
        self.parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]

    def num_steps(self, progress: float) -> int:
        return self.num_positions

    def learn(self, pack: Pack, num_steps: int, loss: Loss, scale: float) -> Tally:
        """Add the gradient of the mean loss times ``scale`` to the parameters'."""
        tally = Tally()
        weights = [self.options.decay**step for step in range(num_steps)]
        pairs = self._pairs(pack)
        factors = [scale * weight / sum(weights) / max(1, int((laws_A >= 0).sum()))
                   for weight, laws_A in zip(weights, pairs, strict=True)]  # fmt: skip
        for part in chunks(len(pack.answers_A), _CHUNK):
            total = self._judge(pack, pairs, part, loss, tally, factors)
            if total is not None:
                total.backward()  # type: ignore[no-untyped-call]
        return tally

    @torch.no_grad()
    def test(self, pack: Pack, loss: Loss) -> Tally:
        """The same without learning."""
        tally, pairs = Tally(), self._pairs(pack)
        for part in chunks(len(pack.answers_A), _CHUNK):
            self._judge(pack, pairs, part, loss, tally, [1.0] * len(pairs))
        return tally

    def _pairs(self, pack: Pack) -> list[Tensor]:
        """For each head and answer row the law that its guess is about, or -1."""
        found = []
        for step in range(self.num_positions):
            rows, laws = pack.pairs(step)
            law_of_A = torch.full_like(pack.answers_A, -1)
            law_of_A[rows] = laws
            found.append(law_of_A)
        return found

    def _judge(
        self, pack: Pack, pairs: list[Tensor], part: slice, loss: Loss, tally: Tally, factors: list[float]
    ) -> Tensor | None:
        logits_KAV = self.head(padded(pack.states_TD[pack.answers_A[part]], _CHUNK))[:, : part.stop - part.start]
        total: Tensor | None = None
        for step, law_of_A in enumerate(pairs):
            known_A = law_of_A[part] >= 0
            laws: Laws = pack.laws.at(law_of_A[part][known_A])
            if len(laws) == 0:
                continue
            losses_N, hits_N, overlap_N = judge(logits_KAV[step][known_A], laws, loss)
            own = losses_N.sum() * factors[step]
            total = own if total is None else total + own
            sums = torch.stack([hits_N.sum().float(), overlap_N.sum(), losses_N.detach().sum()]).tolist()
            tally.add(step, len(losses_N), *sums)
        return total


def new_heads(model: CausalLM, options: MedusaOptions, draft_ids: list[int]) -> MedusaHeads:
    """Heads for this target, before training: they say what the target says of the next token."""
    info = model.info
    config = MedusaConfig(
        hidden_size=info.hidden_size,
        vocab_size=info.vocab_size,
        draft_vocab_size=len(draft_ids),
        num_heads=options.num_heads,
    )
    output_VD = model.ends().head_rows(torch.tensor(draft_ids, device=info.device))
    return MedusaHeads(config, output_VD, draft_ids).to(info.device)

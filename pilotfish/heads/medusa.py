"""Medusa's heads: each guesses one token further ahead from the same last state (Cai et al. 2024, arXiv 2401.10774).

They do not know caches, requests or how they are trained. The one trick: head k is one residual layer in front of the
target's own output matrix, x + SiLU(W_k x + b_k), which starts as nothing (W = b = 0); so what is trained and stored is
small, and an untrained head says what the target says of the next token.

The state is what the target gives its output matrix: the last layer's output behind the last norm. Of row t, whose next
token t + 1 is the pending one, head k (from 0) guesses token t + 2 + k. No head sees the pending token, nor another's
guess: that is Medusa's limit, and why it branches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import members_of, offsets_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """hidden_size, vocab_size: the target's. num_heads: how many tokens ahead. draft_vocab_size: ids they can say."""

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_heads: int = 4

    def __post_init__(self) -> None:
        assert self.num_heads >= 1 and 0 < self.draft_vocab_size <= self.vocab_size


class MedusaHeads(nn.Module):
    """output_VD: the target's output matrix, the rows that the heads can say; frozen, and not stored with them.
    draft_ids: the target's ids that these rows stand for, ascending; all of them if None."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: MedusaConfig, output_VD: Tensor, draft_ids: Sequence[int] | None = None):
        super().__init__()
        self.config = config
        ids = range(config.vocab_size) if draft_ids is None else draft_ids
        assert len(ids) == config.draft_vocab_size == len(output_VD), (len(ids), len(output_VD))
        self.blocks = nn.Linear(config.hidden_size, config.num_heads * config.hidden_size)
        nn.init.zeros_(self.blocks.weight)
        nn.init.zeros_(self.blocks.bias)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.lm_head.weight = nn.Parameter(output_VD.detach(), requires_grad=False)
        d2t = offsets_of(ids)
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", members_of(d2t + torch.arange(len(ids)), config.vocab_size))

    def target_ids(self) -> Tensor:
        """int64 [draft vocabulary]: the target's id of each draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """Normed last states [T, hidden] -> logits [heads, T, draft vocabulary]."""
        config, rows = self.config, len(hidden_TD)
        added_TKD = F.silu(self.blocks(hidden_TD)).view(rows, config.num_heads, config.hidden_size)
        states_KTD = (hidden_TD[:, None] + added_TKD).transpose(0, 1)
        logits: Tensor = self.lm_head(states_KTD.reshape(-1, config.hidden_size))
        return logits.view(config.num_heads, rows, -1)

"""The EAGLE-3 head: one decoder layer that drafts from what the target computed (Li et al. 2025, arXiv 2503.01840).

It does not know caches, requests or how it is trained. The one trick: attention is a callback. Where earlier keys lie
(pages when drafting, whole texts with the mask of training-time test when training) is the caller's matter, so there is
one module for both.

    row i of a text      token i+1 and, of the target's row i, three layers' states, fused to one
    first guess          hidden_0 = forward(tokens[i+1], fuse(states of rows i)), logits(hidden_0) is about token i+2
    second guess         hidden_1 = forward(the guess,  hidden_0), one position on; and so on: the head feeds itself

A row's position is i, that of its states; only differences of positions matter. Weights are named in the file as the
package `speculators` names them (see `store`); here, products of the same input are one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.decoder import rotated
from .layers import RMSNorm, members_of, offsets_of

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [T, H, D], k [T, G, D], v [T, G, D], rotated) -> [T, H, D]: what each row takes from the keys that it sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """Sizes of a head.

    hidden_size, vocab_size: the target's. draft_vocab_size: how many of the target's ids it can say. taps: the target's
    layers, counted from 0, whose outputs are fused. rope_scaling: as in a Hugging Face config; None: plain rotations.
    norm_before_residual, fc_norm, norm_before_fc, norm_output, qk_norm: variants that published heads have; the last
    one is Qwen3's, ``norm_output`` (what is fed back is normed) and ``fc_norm`` (each tap is) are EAGLE-3.1's.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    context: int = 2048
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_key_heads == 0 and self.head_dim % 2 == 0
        assert self.taps and not (self.norm_before_fc and self.fc_norm)
        assert 0 < self.draft_vocab_size <= self.vocab_size


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """A low, a middle and a high layer: the outputs of layers 1, n/2 - 1 and n - 4. The authors' code takes the same
    (and counts them as inputs of the next layer: 2, n/2, n - 3). For tiny models the nearest there are."""
    low, middle, high = 1, num_layers // 2 - 1, num_layers - 4
    if low < middle < high:
        return low, middle, high
    return 0, num_layers // 2, num_layers - 1


class Eagle3Head(nn.Module):
    """embed: the target's table, ids [T] -> [T, hidden]; it is borrowed, and no part of the state.
    draft_ids: the target's ids that the head can say, ascending; all of them if None.

    Weights are as torch makes them; see `store` for loading.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config, embed: Callable[[Tensor], Tensor], draft_ids: Sequence[int] | None = None):
        super().__init__()
        self.config, self.embed = config, embed
        ids = range(config.vocab_size) if draft_ids is None else draft_ids
        assert len(ids) == config.draft_vocab_size, (len(ids), config.draft_vocab_size)
        hidden, dim = config.hidden_size, config.head_dim
        num_projected = (config.num_heads + 2 * config.num_key_heads) * dim

        def norm(width: int = hidden) -> RMSNorm:
            return RMSNorm(width, config.norm_epsilon)

        self.input_norm = norm(len(config.taps) * hidden) if config.norm_before_fc else None
        self.fc_norms = nn.ModuleList(norm() for _ in config.taps) if config.fc_norm else None
        self.fc = nn.Linear(len(config.taps) * hidden, hidden, bias=False)
        self.embedding_norm, self.hidden_norm = norm(), norm()
        self.qkv = nn.Linear(2 * hidden, num_projected, bias=False)
        self.q_norm = norm(dim) if config.qk_norm else None
        self.k_norm = norm(dim) if config.qk_norm else None
        self.out = nn.Linear(config.num_heads * dim, hidden, bias=False)
        self.mlp_norm = norm()
        self.gate_up = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, hidden, bias=False)
        self.norm = norm()
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        d2t = offsets_of(ids)
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", members_of(d2t + torch.arange(len(ids)), config.vocab_size))
        frequencies, self.rope_scale = _rotations(config)
        self.register_buffer("frequencies", frequencies, persistent=False)

    frequencies: Tensor

    def target_ids(self) -> Tensor:
        """int64 [draft vocabulary]: the target's id of each draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def fuse(self, taps_T3D: Tensor) -> Tensor:
        """States of the tapped layers, side by side [T, 3 hidden] -> what row ``t`` starts from, [T, hidden]."""
        if self.input_norm is not None:
            taps_T3D = self.input_norm(taps_T3D)
        if self.fc_norms is not None:
            parts = taps_T3D.chunk(len(self.fc_norms), dim=-1)
            taps_T3D = torch.cat([norm(part) for norm, part in zip(self.fc_norms, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(taps_T3D)
        return fused

    def forward(self, tokens_T: Tensor, hidden_TD: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """One step of the head: what is fed back as ``hidden_TD`` and given to `logits`, [T, hidden].

        tokens_T: the target's ids, each the token after the one that ``hidden_TD`` was computed from.
        """
        config, rows = self.config, len(tokens_T)
        normed_TD = self.hidden_norm(hidden_TD)
        residual_TD = normed_TD if config.norm_before_residual else hidden_TD
        embedded_TD = self.embedding_norm(self.embed(tokens_T).to(hidden_TD.dtype))
        projected_THD = self.qkv(torch.cat([embedded_TD, normed_TD], dim=-1)).view(rows, -1, config.head_dim)
        q_THD, k_TGD, v_TGD = projected_THD.split([config.num_heads, config.num_key_heads, config.num_key_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TGD = self.q_norm(q_THD), self.k_norm(k_TGD)
        turns = self._turns(positions_T, hidden_TD.dtype)
        out_THD = attend(rotated(q_THD, *turns), rotated(k_TGD, *turns), v_TGD)
        x_TD = residual_TD + self.out(out_THD.reshape(rows, -1))
        gate, up = self.gate_up(self.mlp_norm(x_TD)).chunk(2, dim=-1)
        x_TD = x_TD + self.down(F.silu(gate) * up)
        return self.norm(x_TD) if config.norm_output else x_TD  # type: ignore[no-any-return]

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """[T, draft vocabulary]; see `target_ids` for what they are about."""
        logits_TV: Tensor = self.lm_head(hidden_TD if self.config.norm_output else self.norm(hidden_TD))
        return logits_TV

    def _turns(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions_T[:, None].float() * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)[:, None, :]
        return (angles.cos() * self.rope_scale).to(dtype), (angles.sin() * self.rope_scale).to(dtype)


def _rotations(config: Eagle3Config) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] and the factor on cosines and sines, as transformers has them."""
    if config.rope_scaling is None:
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        return 1.0 / config.rope_theta**steps, 1.0
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_theta": config.rope_theta, **config.rope_scaling}
    llama: Any = LlamaConfig(
        hidden_size=config.num_heads * config.head_dim,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.context,
        rope_parameters=rope,
    )
    module: Any = LlamaRotaryEmbedding(llama)
    return module.inv_freq, float(module.attention_scaling)

"""Learning to draft as EAGLE-3 does: training-time test (Li et al. 2025, arXiv 2503.01840, section 3.2).

It does not know where lessons come from. The one trick: in unrolled step s a row's keys are those of the text up to its
own place, made from the target's states, and the s that it made itself; nobody else sees the latter. So one pass over
whole texts and s cheap ones over their answers do for all places what drafting does for one.

    step 0, row i     token i+1, the target's states of row i;     sees keys 0..i                          -> token i+2
    step s, row i     token i+1+s, what step s-1 gave in row i;    sees keys 0..i, and its own of steps 1..s
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..heads.eagle3 import Eagle3Config, Eagle3Head, default_taps
from ..models.base import CausalLM
from .lessons import Pack, Span, chunks, padded
from .losses import Tally, judge
from .options import Eagle3Options, Loss

_CHUNK = 256  # rows whose logits are in memory at once
_QUERIES = 256


class Eagle3Task:
    """A head and how it learns. num_positions: how far ahead it is judged."""

    def __init__(self, head: Eagle3Head, options: Eagle3Options):
        self.head, self.options = head, options
        self.num_positions = options.unroll
        self.parameters = list(head.parameters())

    def num_steps(self, progress: float) -> int:
        """Unrolled steps, by how far the training is, from 0 to 1: the first half learns to guess one token."""
        return 1 if progress < 0.5 else self.options.unroll

    def learn(self, pack: Pack, num_steps: int, loss: Loss, scale: float) -> Tally:
        """Add the gradient of the mean loss times ``scale`` to the parameters'."""
        tally, ends, grads = Tally(), [], []
        weights = [self.options.decay**step for step in range(num_steps)]
        for step, hidden_AD in enumerate(unrolled(self.head, pack, num_steps)):
            rows, laws = pack.pairs(step)
            if len(rows) == 0:
                continue
            grad_AD = torch.zeros_like(hidden_AD)
            factor = scale * weights[step] / sum(weights) / len(rows)
            for part in chunks(len(rows), _CHUNK):
                # The logits' graph is gone before the next chunk's is made: a draft vocabulary is wide.
                leaf = hidden_AD.detach()[rows[part]].requires_grad_()
                losses_N, hits_N, overlap_N = judge(self._logits(leaf), pack.laws.at(laws[part]), loss)
                (losses_N.sum() * factor).backward()  # type: ignore[no-untyped-call]
                assert leaf.grad is not None
                grad_AD[rows[part]] = leaf.grad
                _count(tally, step, losses_N, hits_N, overlap_N)
            ends.append(hidden_AD)
            grads.append(grad_AD)
        if ends:
            torch.autograd.backward(ends, grads)
        return tally

    @torch.no_grad()
    def test(self, pack: Pack, loss: Loss) -> Tally:
        """The same without learning, all positions."""
        tally = Tally()
        for step, hidden_AD in enumerate(unrolled(self.head, pack, self.num_positions)):
            rows, laws = pack.pairs(step)
            for part in chunks(len(rows), _CHUNK):
                judged = judge(self._logits(hidden_AD[rows[part]]), pack.laws.at(laws[part]), loss)
                _count(tally, step, *judged)
        return tally

    def _logits(self, hidden_ND: Tensor) -> Tensor:
        return self.head.logits(padded(hidden_ND, _CHUNK))[: len(hidden_ND)]


def _count(tally: Tally, step: int, losses_N: Tensor, hits_N: Tensor, overlap_N: Tensor) -> None:
    sums = torch.stack([hits_N.sum().float(), overlap_N.sum(), losses_N.detach().sum()]).tolist()
    tally.add(step, len(losses_N), *sums)


def unrolled(head: Eagle3Head, pack: Pack, num_steps: int) -> list[Tensor]:
    """What each step gives in every answer row, [A, hidden] each."""
    attention = _Attention(pack, head.config.head_dim**-0.5)
    # What is fed on stays float32 where products are done in less: errors would add up over the steps.
    fused_TD = head.fuse(padded(pack.states_TD)).float()
    hidden_TD = head(padded(pack.following(1, False)), fused_TD, padded(pack.positions(False)), attention.over_text)
    hidden_AD, count = hidden_TD[padded(pack.answers_A)], len(pack.answers_A)
    outputs = [hidden_AD[:count]]
    positions_A = padded(pack.positions(True))
    for step in range(1, num_steps):
        tokens_A = padded(pack.following(1 + step, True))
        hidden_AD = head(tokens_A, hidden_AD, positions_A + step, attention.over_own)
        outputs.append(hidden_AD[:count])
    return outputs


class _Attention:
    """Keys of the text in spans, and of the own steps. All in float32: little work, and shapes of all kinds."""

    def __init__(self, pack: Pack, scale: float):
        self.spans, self.scale, self.device = pack.spans, scale, pack.states_TD.device.type
        self.keys: Tensor | None = None  # of the text, [T, G, D]
        self.values: Tensor | None = None
        self.own: list[tuple[Tensor, Tensor]] = []  # of each step from 1 on, [A, G, D]

    def over_text(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """Step 0: every row sees its text up to itself."""
        with torch.autocast(self.device, enabled=False):
            self.keys, self.values = k_TGD.float(), v_TGD.float()
            parts = []
            for span in self.spans:
                rows = slice(span.start, span.stop)
                q, k, v = (x[rows].transpose(0, 1)[None] for x in (q_THD.float(), self.keys, self.values))
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
                parts.append(out[0].transpose(0, 1))
            return _as_many(parts, q_THD)

    def over_own(self, q_AHD: Tensor, k_AGD: Tensor, v_AGD: Tensor) -> Tensor:
        """Step s: every answer row sees its text up to itself, and its own s rows."""
        with torch.autocast(self.device, enabled=False):
            self.own.append((k_AGD.float(), v_AGD.float()))
            parts = []
            for span in self.spans:
                for part in chunks(span.stop - span.first, _QUERIES):
                    parts.append(self._rows(q_AHD.float(), span, part))
            return _as_many(parts, q_AHD)

    def _rows(self, q_AHD: Tensor, span: Span, part: slice) -> Tensor:
        """Some answer rows of one text: one softmax over the keys of the text and the own ones."""
        assert self.keys is not None and self.values is not None
        mine = slice(span.first_answer + part.start, span.first_answer + part.stop)
        last = span.first + part.stop  # no row of the part sees further
        q, keys, values = q_AHD[mine], self.keys[span.start : last], self.values[span.start : last]
        rows, heads, dim = q.shape
        groups = keys.shape[1]
        q_GHRD = q.view(rows, groups, heads // groups, dim).permute(1, 2, 0, 3)  # heads of one group share their keys
        scores = (q_GHRD.reshape(groups, -1, dim) @ keys.permute(1, 2, 0)).view(groups, -1, rows, len(keys))
        places = torch.arange(len(keys), device=q.device)
        seen = places[None, :] <= places[len(keys) - rows :, None]
        scores = scores.masked_fill(~seen, float("-inf"))
        own = [(q_GHRD * k[mine].transpose(0, 1)[:, None]).sum(-1, keepdim=True) for k, _ in self.own]
        weights = torch.softmax(torch.cat([scores, *own], dim=-1) * self.scale, dim=-1)
        text = weights[..., : len(keys)].reshape(groups, -1, len(keys)) @ values.transpose(0, 1)
        out = text.view(groups, -1, rows, dim)
        for step, (_, v) in enumerate(self.own):
            out = out + weights[..., len(keys) + step, None] * v[mine].transpose(0, 1)[:, None]
        return out.permute(2, 0, 1, 3).reshape(rows, heads, dim)


def _as_many(parts: list[Tensor], rows: Tensor) -> Tensor:
    """The parts, and zeros for the rows that only fill up."""
    whole = torch.cat(parts)
    return F.pad(whole, (0, 0, 0, 0, 0, len(rows) - len(whole)))


def new_head(
    model: CausalLM, options: Eagle3Options, draft_ids: list[int], embed: Callable[[Tensor], Tensor]
) -> Eagle3Head:
    """A head for this target, before training. Its output matrix starts as the target's, the rest as torch makes it,
    from ``options.seed``."""
    info, ends = model.info, model.ends()
    shape = info.layers[0]
    num_heads = _num_heads(model)
    config = Eagle3Config(
        hidden_size=info.hidden_size,
        intermediate_size=_inner_size(model),
        num_heads=num_heads,
        num_key_heads=shape.num_heads if num_heads % shape.num_heads == 0 else num_heads,
        head_dim=shape.key_dim,
        vocab_size=info.vocab_size,
        draft_vocab_size=len(draft_ids),
        taps=options.taps or default_taps(len(info.layers)),
        context=info.context,
        fc_norm=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        head = Eagle3Head(config, embed, draft_ids)
    with torch.no_grad():
        head.lm_head.weight.copy_(ends.head_rows(torch.tensor(draft_ids, device=info.device)))
        # What the last norm makes of ones, whose mean square is 1, is its weight.
        head.norm.weight.copy_(ends.norm(torch.ones(1, info.hidden_size, device=info.device))[0])
        # The target's scale is for states that mean something: with others its logits are confident and wrong, and the
        # first hundred steps would go into unlearning that. So the norm starts where random states' logits spread by 1.
        generator = torch.Generator().manual_seed(options.seed)
        states_ND = torch.randn(64, info.hidden_size, generator=generator)
        head.norm.weight.div_(head.logits(states_ND).std().clamp(min=1e-3))
    return head.to(info.device)


def _num_heads(model: CausalLM) -> int:
    architecture = getattr(model, "architecture", None)
    if architecture is not None:
        return int(architecture.num_heads)
    return max(1, model.info.hidden_size // model.info.layers[0].key_dim)


def _inner_size(model: CausalLM) -> int:
    architecture = getattr(model, "architecture", None)
    if architecture is not None:
        return int(architecture.intermediate_size)
    return -(-model.info.hidden_size * 8 // 3 // 32) * 32

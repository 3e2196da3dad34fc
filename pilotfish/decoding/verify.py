"""The acceptance rules: which drafted tokens stand, and the one token that follows them.

p is the target's law, q the drafter's; both after warping. Row 0 of ``p_NV`` is the law after the pending token, row
i + 1 the law after node i. Nothing here draws: all chance comes in through a `Noise`, so tests can enumerate every
branch. Nothing here is lossy: whatever the draft, the emitted tokens follow p.

    rejection   chains and trees: Leviathan et al. 2023, Algorithm 1; on trees recursively without replacement
                (Jeon et al. 2024, RSD; Chen et al. 2024, Sequoia)
    block       chains: Sun et al., ICLR 2025, Algorithm 2; never accepts fewer tokens than rejection
    coupled     any: the token is fixed by (p, seed, position) alone and drafts only guess it
    greedy      any: the limit of all three at temperature 0

The one trick: a drawn token's law (`Draft.probs`) already has its earlier siblings taken out, so trees without
replacement need no special case: each sibling is an ordinary rejection test against what is left of p.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from ..lazily import np, torch
from .draft import Draft
from .noise import Noise

if TYPE_CHECKING:
    from torch import Tensor

Rule = Literal["rejection", "block", "coupled"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``path``: the accepted nodes from the root down. ``token``: what follows them (residual or bonus token)."""

    path: tuple[int, ...]
    token: int


class Laws(Protocol):
    """The target's laws, a row [V] at a time: a tensor, or whatever makes a row when it is asked for. Only ``block``
    looks at rows off the accepted path."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Tensor: ...


def verify(draft: Draft, p_NV: Laws, rule: Rule, noise: Noise) -> Verdict:
    """Apply a rule to one request's draft.

    p_NV: [len(draft) + 1, V], the target's laws, normalised; for ``block`` a tensor. Raises an AssertionError for a
    tree under ``block``.
    """
    assert len(p_NV) == len(draft) + 1, (len(p_NV), len(draft))
    if rule == "coupled":
        return match(draft, lambda row, depth: noise.race(depth, p_NV[row]))
    if rule == "block":
        assert isinstance(p_NV, torch.Tensor)
        return _block(draft, p_NV, noise)
    return _rejection(draft, p_NV, noise)


def match(draft: Draft, choose: Callable[[int, int], int]) -> Verdict:
    """Walk down while the target's own choice is among the guesses. ``choose(row, depth)`` is that choice."""
    children, node, path = draft.children(), -1, list[int]()
    while True:
        token = choose(node + 1, len(path))
        node = next((child for child in children[node] if draft.tokens[child] == token), -1)
        if node < 0:
            return Verdict(tuple(path), token)
        path.append(node)


def _rejection(draft: Draft, p_NV: Laws, noise: Noise) -> Verdict:
    """Accept x with probability min(1, p / q), else go on with norm(max(p - q, 0)): its next sibling, or the end."""
    if draft.probs is None:
        return _rejection_of_points(draft, p_NV, noise)
    q_of_node = _drawn_probabilities(draft, draft.probs)
    children, node, path = draft.children(), -1, list[int]()
    while True:
        left_V = p_NV[node + 1]
        accepted = -1
        for sibling, child in enumerate(children[node]):
            # The first sibling meets p itself; later ones meet what is left of it.
            p, q = float(left_V[draft.tokens[child]]), q_of_node[child]
            if p > 0 and noise.accept(len(path), sibling, p / q if q > 0 else 1.0):
                accepted = child
                break
            left_V = residual(left_V, draft.probs[child])
        if accepted < 0:
            return Verdict(tuple(path), noise.choose(len(path), left_V))
        path.append(accepted)
        node = accepted


def _rejection_of_points(draft: Draft, p_NV: Laws, noise: Noise) -> Verdict:
    """The same for chosen tokens: q is one-hot, so a rejected guess only loses its own mass, and scalars suffice."""
    children, node, path = draft.children(), -1, list[int]()
    while True:
        p_V, tried = p_NV[node + 1], list[int]()
        left, accepted = 1.0, -1
        for sibling, child in enumerate(children[node]):
            p = float(p_V[draft.tokens[child]])
            if p > 0 and noise.accept(len(path), sibling, p / left if left > p else 1.0):
                accepted = child
                break
            tried.append(draft.tokens[child])
            left -= p
        if accepted < 0:
            return Verdict(tuple(path), noise.choose(len(path), _without(p_V, tried)))
        path.append(accepted)
        node = accepted


def _block(draft: Draft, p_NV: Tensor, noise: Noise) -> Verdict:
    """Block verification: the whole chain is judged by joint ratios, and the *last* success counts.

    With w_0 = 1, w_i = min(1, w_(i-1) p(x_i) / q(x_i)): position i < K succeeds with probability
    h_i = A_i / (A_i + 1 - w_i), A_i = sum_x max(w_i p(x | x_<=i) - q(x | x_<=i), 0), and h_K = w_K. The draws are
    independent and a failure does not end the walk. Three plausible variants of this are biased (see the tests).
    """
    assert draft.is_chain, "block verification is for chains"
    n, (p_of_node, q_of_node) = len(draft), own_probabilities(draft, p_NV)
    weights = [1.0]
    for p, q in zip(p_of_node, q_of_node, strict=True):
        weights.append(min(1.0, weights[-1] * (p / q if q > 0 else 1.0)) if p > 0 else 0.0)
    masses = _block_masses(draft, p_NV, weights, p_of_node)
    num_accepted = 0
    for i in range(1, n + 1):
        mass = weights[i] if i == n else masses[i]
        rest = 0.0 if i == n else 1.0 - weights[i]
        chance = mass if i == n else (mass / (mass + rest) if mass + rest > 0 else 1.0)
        # A chain with p = 0 somewhere has weight 0 from there on, and then its chance is 0 as well.
        if noise.accept(i - 1, 0, chance):
            num_accepted = i
    left_V = p_NV[num_accepted]
    if num_accepted < n:
        if draft.probs is None:
            left_V = _without(left_V, [draft.tokens[num_accepted]])
        else:
            left_V = _or_else(_beyond(weights[num_accepted], left_V, draft.probs[num_accepted]), left_V)
    return Verdict(tuple(range(num_accepted)), noise.choose(num_accepted, left_V))


def _block_masses(draft: Draft, p_NV: Tensor, weights: list[float], p_of_node: list[float]) -> list[float]:
    """A_i for i in 0..K-1 (A_0 is not used): the mass of max(w_i p - q, 0) at the law after i tokens."""
    if draft.probs is None:  # q is one-hot at the next token, and w p <= 1 there: only that token's mass is lost
        return [w * (1.0 - p) for w, p in zip(weights[:-1], p_of_node, strict=True)]
    return [_mass(_beyond(*of_one)) for of_one in zip(weights[:-1], p_NV[:-1], draft.probs, strict=True)]


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """norm(max(p - q, 0)), or p itself where that is numerically nothing (p = q: any law of mass 0 will do)."""
    left_V = _beyond(1.0, p_V, q_V)
    total = _mass(left_V)
    if total <= 0:
        return p_V
    if _on_cpu(left_V):
        rows = left_V.numpy()
        rows /= total
        return left_V
    return left_V.div_(total)


def _on_cpu(x: Tensor) -> bool:
    """Then numpy does it, on one thread: `sampling` says why."""
    return x.device.type == "cpu"


def _beyond(weight: float, p_V: Tensor, q_V: Tensor) -> Tensor:
    """max(w p - q, 0)"""
    if not _on_cpu(p_V):
        return (weight * p_V - q_V).clamp_(min=0)
    left_V = weight * p_V.numpy() - q_V.numpy()
    return torch.from_numpy(np.maximum(left_V, 0, out=left_V))


def _mass(weights_V: Tensor) -> float:
    return float(weights_V.numpy().sum(dtype=np.float64) if _on_cpu(weights_V) else weights_V.sum())


def _without(p_V: Tensor, tokens: list[int]) -> Tensor:
    """p with these ids taken out, not normalised; p itself if nothing is left."""
    if not tokens:
        return p_V
    left_V = torch.from_numpy(p_V.numpy().copy()) if _on_cpu(p_V) else p_V.clone()
    left_V[tokens] = 0
    return _or_else(left_V, p_V)


def _or_else(weights_V: Tensor, fallback_V: Tensor) -> Tensor:
    return weights_V if (weights_V.numpy() if _on_cpu(weights_V) else weights_V).max() > 0 else fallback_V


def own_probabilities(draft: Draft, p_NV: Tensor) -> tuple[list[float], list[float]]:
    """For each node p(token | its parent) and q(token): two lists of n floats, in one transfer each."""
    n = len(draft)
    if n == 0:
        return [], []
    device = p_NV.device
    tokens_n = torch.tensor(draft.tokens, device=device)
    rows_n = torch.tensor([parent + 1 for parent in draft.parents], device=device)
    p: list[float] = p_NV[rows_n, tokens_n].tolist()
    return p, [1.0] * n if draft.probs is None else _drawn_probabilities(draft, draft.probs)


def _drawn_probabilities(draft: Draft, probs: Tensor) -> list[float]:
    tokens_n = torch.tensor(draft.tokens, dtype=torch.int64, device=probs.device)
    q: list[float] = probs[torch.arange(len(draft), device=probs.device), tokens_n].tolist()
    return q

"""Several passes of one text on a law of two tokens: do the coins of one pass leak into the next?

It does not know models or engines: only the acceptance rules and their noise, as installed. The one trick is the law.
``block`` looks at coins beyond the last accepted token, so a coin met again in a later pass biases it, and with a q
far from p nearly every pass leaves some behind; with a q nearer to it, chains are accepted to their end. The laws of a
real model and its draft can hide either mistake.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..decoding.draft import chain
from ..decoding.noise import SeededNoise
from ..decoding.verify import Rule, verify
from .ground import seed_stream
from .statistics import Tally

LENGTH = 4
_P = (0.5, 0.5)
_DRAFTS = ((2, (0.1, 0.9)), (4, (0.35, 0.65)))  # how many tokens a pass, and q


def draw_texts(rule: Rule, num_draws: int, seed: int) -> Tally:
    """Texts of four tokens in one to four passes, ``num_draws`` for each kind of draft, against their joint law."""
    p_V = torch.tensor(_P, dtype=torch.float64)
    law: Mapping[Any, float] = {
        text: float(p_V[list(text)].prod()) for text in itertools.product(range(len(_P)), repeat=LENGTH)
    }
    tally, seeds = Tally(), seed_stream(seed, 40)
    for num_drafted, q in _DRAFTS:
        q_V = torch.tensor(q, dtype=torch.float64)
        for _ in range(num_draws):
            tally.add(num_drafted, law, tuple(_text(rule, p_V, q_V, num_drafted, seeds())))
    return tally


def _text(rule: Rule, p_V: Tensor, q_V: Tensor, num_drafted: int, seed: int) -> list[int]:
    text: list[int] = []
    while len(text) < LENGTH:
        noise = SeededNoise(seed, 1 + len(text))
        draft = chain([noise.draw(depth, q_V) for depth in range(num_drafted)], q_V.expand(num_drafted, -1))
        verdict = verify(draft, p_V.expand(num_drafted + 1, -1), rule, noise)
        text += [*(draft.tokens[node] for node in verdict.path), verdict.token]
    return text[:LENGTH]

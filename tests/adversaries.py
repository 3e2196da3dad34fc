"""Drafters that try to break a request: wrong, random, lying, failing, branching; and any method of the package.

They know the protocol of drafters and nothing of the engine. The one trick: what they do at a place in a text depends
on the request and that place alone, so a test that fails once fails always.
"""

import functools
import random
from collections.abc import Callable, Sequence, Set
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from pilotfish.decoding.draft import EMPTY, Draft, chain
from pilotfish.decoding.sampling import warp
from pilotfish.drafters import registry
from pilotfish.drafters.base import Drafter
from pilotfish.heads.eagle3 import Eagle3Config, Eagle3Head, default_taps
from pilotfish.heads.medusa import MedusaConfig, MedusaHeads
from pilotfish.models.load import Loaded
from tests.fakes import TableModel, choose


class Scripted(Drafter):
    """Drafts what a function of (request, limit) says."""

    def __init__(self, script: Callable[[Any, int], Draft], *, trees: bool = False):
        self.script = script
        self.trees = trees  # type: ignore[misc]

    def propose(self, requests: Sequence[Any], limits: Sequence[int]) -> list[Draft]:
        return [self.script(request, limit) for request, limit in zip(requests, limits, strict=True)]


def foresight(model: TableModel, *, wrong: bool = False) -> Scripted:
    """Knows the target: always right. Without a seed it draws from p itself. wrong: always the next id instead."""

    def script(request: Any, limit: int) -> Draft:
        tokens, laws = [], []
        for depth in range(limit):
            context = (request.params, request.prompt, [request.output + tokens], request.stop_ids)
            logits_V = model.logits_of(request.tokens + tokens)
            drawn = not request.params.greedy and request.rule != "coupled"
            if drawn:
                laws.append(warp(logits_V[None], *context)[0])
                token = rng(request, depth).choices(range(len(laws[-1])), laws[-1].tolist())[0]
            else:
                token = choose(logits_V, *context[:2], request.output + tokens, request.stop_ids, request.seed)
            tokens.append((token + 1) % model.info.vocab_size if wrong else token)
        return chain(tokens, torch.stack(laws) if laws and not wrong else None)

    return Scripted(script)


def rng(request: Any, salt: object = "") -> random.Random:
    """Randomness of a drafter's own, from the request's place in its text."""
    return random.Random(f"{request.id} {len(request.tokens)} {salt}")


def guesser(num_ids: int, *, too_many: int = 0, offset: int = 0) -> Scripted:
    """Chains of random ids. too_many: more than the limit. offset: added to the ids (beyond the table, or below 0)."""

    def script(request: Any, limit: int) -> Draft:
        source = rng(request)
        return chain([offset + source.randrange(num_ids) for _ in range(min(63, limit + too_many))])

    return Scripted(script)


def random_trees(num_ids: int, q: Callable[[Sequence[int]], Tensor] | None = None) -> Scripted:
    """Trees of random shape. q: a law [V] per text; then tokens are drawn from it, siblings without replacement.

    Without q the tokens are chosen at random, and the likeliest ids are as good a guess as any.
    """

    def script(request: Any, limit: int) -> Draft:
        shape, draws = rng(request, "shape"), rng(request, "draws")
        tokens: list[int] = []
        parents: list[int] = []
        laws: list[Tensor] = []
        for _ in range(limit):
            parent = shape.randrange(-1, len(tokens))
            path, node = [], parent
            while node >= 0:
                path.insert(0, tokens[node])
                node = parents[node]
            taken = [token for token, other in zip(tokens, parents, strict=True) if other == parent]
            law_V = torch.ones(num_ids, dtype=torch.float64) if q is None else q([*request.tokens, *path]).clone()
            law_V[taken] = 0
            if not float(law_V.sum()) > 0:
                continue
            laws.append(law_V / law_V.sum())
            tokens.append(draws.choices(range(num_ids), laws[-1].tolist())[0])
            parents.append(parent)
        return Draft(tuple(tokens), tuple(parents), torch.stack(laws) if q is not None and laws else None)

    return Scripted(script, trees=True)


def sampled_chain(
    q: Callable[[Sequence[int]], Tensor], *, claim: Callable[[Tensor], Tensor] = lambda q_V: q_V
) -> Scripted:
    """Chains drawn from a law per text. claim: what it says its law was; anything but the identity is a lie."""

    def script(request: Any, limit: int) -> Draft:
        draws, tokens, laws = rng(request), list[int](), list[Tensor]()
        for _ in range(limit):
            law_V = q(request.tokens + tokens)
            tokens.append(draws.choices(range(len(law_V)), law_V.tolist())[0])
            laws.append(claim(law_V))
        return chain(tokens, torch.stack(laws) if laws else None)

    return Scripted(script)


class Faulty(Drafter):
    """Wraps a drafter and fails: in ``propose`` every other time, and in the methods named in ``also``."""

    def __init__(self, inner: Drafter, also: Set[str] = frozenset()):
        self.inner, self.also, self.num_calls = inner, also, 0

    def propose(self, requests: Sequence[Any], limits: Sequence[int]) -> list[Draft]:
        self.num_calls += 1
        drafts = self.inner.propose(requests, limits)
        if self.num_calls % 2:
            raise RuntimeError("a drafter's own mistake")
        return drafts

    def observe(self, steps: Any, taps: Any) -> None:
        if "observe" in self.also:
            raise RuntimeError("a drafter's own mistake")

    def release(self, request: Any) -> None:
        if "release" in self.also:
            raise RuntimeError("a drafter's own mistake")


class SlowStart(Drafter):
    """No idea in a request's first ``delay`` steps and every third one, otherwise as the drafter inside."""

    def __init__(self, inner: Drafter, delay: int = 3):
        self.inner, self.delay, self.seen = inner, delay, dict[str, int]()

    def propose(self, requests: Sequence[Any], limits: Sequence[int]) -> list[Draft]:
        drafts = self.inner.propose(requests, limits)
        for request in requests:
            self.seen[request.id] = self.seen.get(request.id, 0) + 1
        idle = [self.seen[r.id] <= self.delay or self.seen[r.id] % 3 == 0 for r in requests]
        return [EMPTY if nothing else draft for nothing, draft in zip(idle, drafts, strict=True)]

    def release(self, request: Any) -> None:
        self.seen.pop(request.id, None)


# The adversaries whose calls fail; the others are merely wrong.
FAILING = {"right and faulty", "right, deaf and unforgetting", "beyond the table", "below zero", "one draft too few"}


def adversaries(model: TableModel) -> dict[str, Callable[[], Drafter]]:
    """Everything a drafter may do wrong, by name. ``model`` is the target, or what its law is guessed to be."""
    num_ids = model.info.vocab_size
    other = TableModel(num_ids, order=1, seed=99, sharpness=1.0)
    return {
        "always right": lambda: foresight(model),
        "always wrong": lambda: foresight(model, wrong=True),
        "random": lambda: guesser(num_ids),
        "too long": lambda: guesser(num_ids, too_many=3),
        "right and faulty": lambda: Faulty(foresight(model)),
        "right, deaf and unforgetting": lambda: Faulty(foresight(model), {"observe", "release"}),
        "beyond the table": lambda: guesser(num_ids, offset=num_ids - 2),
        "below zero": lambda: guesser(num_ids, offset=-2),
        "one draft too few": lambda: _Short(),
        "random trees": lambda: random_trees(num_ids),
        "sampled trees": lambda: random_trees(num_ids, other.law),
        "trees near the target": lambda: random_trees(num_ids, model.law),
        "sampled chain": lambda: sampled_chain(other.law),
        "slow start": lambda: SlowStart(foresight(model)),
    }


class _Short(Drafter):
    def propose(self, requests: Sequence[Any], limits: Sequence[int]) -> list[Draft]:
        return [chain([0])] * (len(requests) - 1)


def method_config(method: str, draft: Loaded) -> dict[str, Any]:
    """A speculative config for any method in the folder. Options whose default cannot work alone get ``draft``, or an
    untrained head for a target of its sizes."""
    info = draft.model.info
    is_head = method in ("eagle3", "medusa")
    model = untrained_head(method, info.hidden_size, info.vocab_size, len(info.layers)) if is_head else draft
    supplies = {"model": model, "drafters": ["ngram", {"method": "draft_model", "model": draft}]}
    names = {f.name for f in fields(registry.drafter_class(method).Options)}
    return {"method": method} | {name: value for name, value in supplies.items() if name in names}


@functools.cache
def untrained_head(method: str, hidden_size: int, num_ids: int, num_layers: int, seed: int = 0) -> torch.nn.Module:
    """Heads with random weights, for a target of these sizes. They can say all ids but the last."""
    generator, ids = torch.Generator().manual_seed(seed), range(max(1, num_ids - 1))
    head: torch.nn.Module
    with torch.random.fork_rng(devices=[]):
        if method == "medusa":
            config = MedusaConfig(hidden_size=hidden_size, vocab_size=num_ids, draft_vocab_size=len(ids), num_heads=3)
            head = MedusaHeads(config, torch.randn(len(ids), hidden_size, generator=generator), ids)
        else:
            sizes = {"hidden_size": hidden_size, "vocab_size": num_ids, "draft_vocab_size": len(ids)}
            shape = {"intermediate_size": 16, "num_heads": 4, "num_key_heads": 2, "head_dim": 8}
            table = torch.randn(num_ids, hidden_size, generator=generator)
            config = Eagle3Config(**sizes, **shape, taps=default_taps(num_layers))
            head = Eagle3Head(config, table.__getitem__, ids)
    for weight in head.parameters():
        weight.data.normal_(0, 1, generator=generator)
    return head

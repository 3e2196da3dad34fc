"""Fakes: a model whose law is an exact table, a byte tokenizer, the drafters that try to break a request, and oracles.

They know the protocols of the package and nothing of its engine. The one trick: `TableModel` reads its context back
out of the KV cache, through the span's mask, as attention would. A row committed to the wrong slot, a node that sees
its sibling, a position that is off by one: each changes the law or fails an assertion, and nothing has to be trained.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence, Set
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from pilotfish.decoding.draft import EMPTY, Draft, chain
from pilotfish.decoding.noise import race
from pilotfish.decoding.sampling import SamplingParams, process, warp
from pilotfish.drafters import registry
from pilotfish.drafters.base import Drafter, Setting
from pilotfish.drafters.none import NoDrafter
from pilotfish.engine.engine import Engine, Event
from pilotfish.engine.options import EngineOptions
from pilotfish.models.base import CausalLM, ModelInfo, ModelOutput
from pilotfish.models.load import Loaded
from pilotfish.models.tokenizer import Tokenizer
from pilotfish.paged.batch import Batch, Span
from pilotfish.paged.cache import KVCache, LayerShape


class TableModel:
    """A `CausalLM` with an exact table: the law depends on the last ``order`` tokens and on a phase.

    The phase is a checksum of all visible tokens and their positions, modulo ``num_phases``: 1 gives a plain Markov
    chain, more make every token of the text count. Each layer keeps tokens in its keys and positions in its values,
    and all that run must agree, so a commit that moves one layer and not the other is seen as well. Without some
    layers the table is another, similar one. ``logits_of`` is the same without a cache. poison: tokens behind which
    the logits are NaN.
    """

    def __init__(
        self,
        num_ids: int = 16,
        *,
        order: int = 2,
        num_phases: int = 1,
        seed: int = 0,
        sharpness: float = 1.5,
        eos: Set[int] = frozenset(),
        context: int = 256,
        name: str = "table",
        poison: Set[int] = frozenset(),
    ):
        generator = torch.Generator().manual_seed(seed)
        shape = (num_phases, num_ids**order, num_ids)
        self.table = sharpness * torch.randn(shape, generator=generator, dtype=torch.float64)
        self.noise = 0.5 * sharpness * torch.randn(shape, generator=generator, dtype=torch.float64)
        self.order, self.num_phases, self.poison = order, num_phases, poison
        self.num_passes = self.num_rows = 0
        self.info = ModelInfo(
            name=name,
            architecture="TableModel",
            vocab_size=num_ids,
            context=context,
            layers=(LayerShape(1, 1, 1), LayerShape(1, 1, 2)),
            hidden_size=2,
            num_bytes=self.table.numel() * 8,
            dtype=torch.float64,
            device=torch.device("cpu"),
            eos_ids=frozenset(eos),
        )

    def new_cache(self, num_pages: int, page_size: int = 16) -> KVCache:
        return KVCache(self.info.layers, num_pages, page_size, dtype=torch.float64)

    def forward(
        self, batch: Batch, cache: KVCache, *, taps: Sequence[int] = (), layers: Sequence[int] | None = None
    ) -> ModelOutput:
        self.num_passes += 1
        self.num_rows += batch.num_rows
        assert int(batch.tokens_T.min()) >= 0 and int(batch.tokens_T.max()) < self.info.vocab_size, "no such row"
        assert int(batch.positions_T.max()) < self.info.context, "a row beyond the context"
        running = range(len(self.info.layers)) if layers is None else layers
        for layer in running:
            cache.keys[layer][batch.slots_T] = batch.tokens_T[:, None, None].double()
            cache.values[layer][batch.slots_T] = batch.positions_T[:, None, None].double()
        held = [(cache.keys[i][:, 0, 0].tolist(), cache.values[i][:, 0, 0].tolist()) for i in running]
        wanted = iter(batch.wanted_N.tolist())
        row, rows = next(wanted, -1), list[Tensor]()
        for span in batch.spans:
            read = _reader(span, held)
            while span.start <= row < span.stop:
                rows.append(self.logits_of(read(row), whole=len(running) == len(self.info.layers)))
                row = next(wanted, -1)
        logits_NV = torch.stack(rows) if rows else torch.empty(0, self.info.vocab_size, dtype=torch.float64)
        states_TH = torch.stack([batch.tokens_T, batch.positions_T], 1).double()
        return ModelOutput(logits_NV, dict.fromkeys(taps, states_TH))

    def logits_of(self, text: Sequence[int], *, whole: bool = True) -> Tensor:
        """The logits [V] behind a text. whole: with all layers."""
        if text[-1] in self.poison:
            return torch.full((self.info.vocab_size,), math.nan, dtype=torch.float64)
        phase = 0
        if self.num_phases > 1:
            phase = sum((position + 1) * (token + 1) for position, token in enumerate(text)) % self.num_phases
        place = 0
        for token in [*[0] * self.order, *text][-self.order :]:
            place = place * self.info.vocab_size + token
        return self.table[phase, place] if whole else self.table[phase, place] + self.noise[phase, place]

    def law(self, text: Sequence[int], temperature: float = 1.0) -> Tensor:
        """The exact law [V] of the next token."""
        return torch.softmax(self.logits_of(text) / temperature, 0)


def _reader(span: Span, rows: Sequence[tuple[list[float], list[float]]]) -> Callable[[int], list[int]]:
    """A function from a row of the batch to the text it sees in the cache: its visible keys in order of position.

    rows: per layer that ran, the token and the position that lie in each slot.
    """
    slots = span.key_slots
    keys = range(slots.start, slots.stop) if isinstance(slots, slice) else slots.tolist()
    views = [[(int(positions[key]), int(tokens[key])) for key in keys] for tokens, positions in rows]
    mask = span.mask(None)
    mask_RK = [[True] * len(keys)] * (span.stop - span.start) if mask is None else mask.tolist()

    def read(row: int) -> list[int]:
        texts = [sorted(itertools.compress(view, mask_RK[row - span.start])) for view in views]
        assert all(text == texts[0] for text in texts), f"row {row}: the layers saw different texts {texts}"
        assert [position for position, _ in texts[0]] == list(range(len(texts[0]))), f"row {row} sees {texts[0]}"
        return [token for _, token in texts[0]]

    return read


class ByteTokenizer(Tokenizer):
    """Id i is the byte ``first_byte + i``; the last id is a special token without a text."""

    def __init__(self, num_ids: int = 257, first_byte: int = 0):
        self.num_bytes, self.first_byte = num_ids - 1, first_byte
        self.eos = num_ids - 1
        # The properties of the base class would ask Hugging Face.
        self.__dict__["vocabulary"] = {f"byte{first_byte + i}": i for i in range(num_ids - 1)} | {"<eos>": self.eos}
        self.__dict__["spelt"] = frozenset(range(num_ids - 1))
        self.__dict__["byte_tokens"] = frozenset()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [byte - self.first_byte for byte in text.encode()]

    def text(self, ids: list[int]) -> str:
        return bytes(self.first_byte + token for token in ids).decode(errors="replace")

    def chat(self, messages: Sequence[Any]) -> list[int]:
        return self.encode("".join(f"[{message['role']}]{message['content']}\n" for message in messages))


# -- oracles: the target's own text, from logits alone, without engine, cache or drafts ---------------------------------


def choose(
    logits_V: Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Set[int],
    seed: int,
) -> int:
    """What the target says next, at temperature 0 or with a seed."""
    context = (params, prompt, [output], stop_ids)
    if params.greedy:
        return int(process(logits_V[None], *context)[0].argmax())
    return race(seed, len(prompt) + len(output), warp(logits_V[None], *context)[0])


def oracle(
    logits_of: Callable[[Sequence[int]], Tensor],
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    eos: Set[int] = frozenset(),
    max_length: int = 10**9,
) -> tuple[int, ...]:
    """The output tokens of plain decoding. Stop strings are not known here."""
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    output: list[int] = []
    while len(output) < params.max_tokens and len(prompt) + len(output) < max_length:
        logits_V = logits_of([*prompt, *output])
        output.append(choose(logits_V, params, prompt, output, stop_ids, params.seed or 0))
        if output[-1] in stop_ids and len(output) > params.min_tokens:
            break
    return tuple(output)


def joint_law(model: TableModel, prompt: Sequence[int], num_tokens: int) -> dict[tuple[int, ...], float]:
    """The exact law of the next tokens together."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        law = {
            (*text, token): before * p
            for text, before in law.items()
            for token, p in enumerate(model.law([*prompt, *text]).tolist())
        }
    return law


# -- drafters -----------------------------------------------------------------------------------------------------------


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
    """No idea for the first ``delay`` steps of a request, then as the drafter it wraps, and every third time nothing."""

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
    """A speculative config for any method in the folder. Options whose default cannot work alone get ``draft``."""
    supplies = {"model": draft, "drafters": ["ngram", {"method": "draft_model", "model": draft}]}
    names = {f.name for f in fields(registry.drafter_class(method).Options)}
    return {"method": method} | {name: value for name, value in supplies.items() if name in names}


# -- driving an engine --------------------------------------------------------------------------------------------------


def engine(
    model: CausalLM,
    drafter: Drafter | Callable[[Setting], Drafter] | None = None,
    *,
    k: int = 5,
    rule: Any = "rejection",
    tokenizer: Tokenizer | None = None,
    entropy: Callable[[], int] | None = None,
    **options: Any,
) -> Engine:
    """An engine around a drafter, a function that builds one, or none."""
    if isinstance(drafter, Drafter):
        found = drafter
        build: Callable[[Setting], Drafter] = lambda _setting: found  # noqa: E731
    else:
        build = drafter or (lambda _setting: NoDrafter())
    return Engine(
        model,
        build,
        EngineOptions(**{"block_size": 4} | options),
        tokenizer=tokenizer,
        rule=rule,
        num_speculative_tokens=k,
        entropy=entropy or itertools.count(1).__next__,
    )


def drain(engine: Engine, limit: int = 10_000) -> list[Event]:
    """Step until nothing is left to do, checking every invariant on the way, and that nothing stays behind."""
    events: list[Event] = []
    for _ in range(limit):
        if not engine.has_work:
            break
        events += engine.step()
        engine.scheduler.check()
    assert not engine.has_work, "it does not end"
    assert engine.cache.pool.num_held == 0 and not engine.cache.sequences, "something stayed behind"
    return events


def run(engine: Engine, prompt: Sequence[int], params: SamplingParams, **more: Any) -> tuple[int, ...]:
    """One request alone, to its end: its output tokens."""
    (request,) = engine.add(prompt, params, **more)
    drain(engine)
    return tuple(request.output)

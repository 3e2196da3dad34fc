"""Thousands of draws from the engine against the target's exact law: accepted, residual and bonus tokens, and texts.

It does not know rules or drafters from the inside. The one trick: target and draft are remembered by token path
(`MemoLM`), so a draw costs no pass, while everything between the logits and the emitted tokens is the engine's own
code: warping, drafting, judging, the commit walk, the cache.

The law is computed here a second time, in float64 and without `warp`, from the target's logits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..decoding.draft import Draft
from ..decoding.noise import fold
from ..decoding.paths import join
from ..decoding.sampling import SamplingParams
from ..decoding.verify import Rule
from ..drafters.base import Setting
from ..engine.engine import Engine, Event
from ..engine.options import EngineOptions
from .actors import Witness
from .ground import Build, Watch, drive, queue, seed_stream
from .memo import MemoLM
from .statistics import Tally

SEATS = 32
_REJECTED = "rejected"  # an outcome beside the tokens
_ROUNDING = 1e-6  # what float32 laws may differ by from float64 ones, in all


@dataclass(frozen=True, slots=True)
class Experiment:
    """Who drafts, and which rule judges. number: its own seeds. num_drafted: most nodes of a draft.

    length: of the texts whose joint law is tested. room: tokens a request may emit beyond a full draft; each makes the
    paths that the models are asked about longer.
    """

    name: str
    build: Build
    rule: Rule
    number: int
    num_drafted: int
    length: int = 2
    room: int = 2

    def __post_init__(self) -> None:
        assert 2 <= self.length <= self.num_drafted + self.room


@dataclass(slots=True)
class Tallies:
    """What was drawn. The first four are exact for every rule and drafter; the other two for `rejection` on chains.

    pair: the first two tokens; text: the first ``length``, where those are more.
    """

    first: Tally = field(default_factory=Tally)
    pair: Tally = field(default_factory=Tally)
    text: Tally = field(default_factory=Tally)
    bonus: Tally = field(default_factory=Tally)
    accepted: Tally = field(default_factory=Tally)
    residual: Tally = field(default_factory=Tally)
    num_drafted: int = 0
    num_accepted: int = 0


class ExactLaws:
    """The target's laws with top_k, temperature and top_p, by token path: {token: probability} over its support."""

    def __init__(self, memo: MemoLM, top_k: int, temperature: float = 1.0, top_p: float = 1.0):
        self.memo, self.top_k, self.temperature, self.top_p = memo, top_k, temperature, top_p
        self._laws: dict[tuple[int, ...], Mapping[int, float]] = {}
        self._joint: dict[tuple[tuple[int, ...], int], Mapping[Any, float]] = {}

    def after(self, path: tuple[int, ...]) -> Mapping[int, float]:
        if path not in self._laws:
            self._laws[path] = exact_law(self.memo.logits(path), self.top_k, self.temperature, self.top_p)
        return self._laws[path]

    def joint(self, path: tuple[int, ...], length: int) -> Mapping[Any, float]:
        """The law of the next ``length`` tokens together."""
        if (path, length) not in self._joint:
            law: dict[tuple[int, ...], float] = {(): 1.0}
            for _ in range(length):
                law = {(*text, x): p * q for text, p in law.items() for x, q in self.after((*path, *text)).items()}
            self._joint[path, length] = law
        return self._joint[path, length]


def exact_law(logits_V: Tensor, top_k: int, temperature: float = 1.0, top_p: float = 1.0) -> dict[int, float]:
    """softmax over the top_k likeliest tokens (ties at the edge included), then over the nucleus of those, float64."""
    logits_V = logits_V.double()
    kept = torch.nonzero(logits_V >= logits_V.topk(min(top_k, len(logits_V))).values[-1]).squeeze(1)
    law = dict(zip(kept.tolist(), (logits_V[kept] / temperature).softmax(0).tolist(), strict=True))
    if top_p == 1:
        return law
    nucleus: dict[int, float] = {}
    for token in sorted(law, key=lambda token: (-law[token], token)):
        if sum(nucleus.values()) >= top_p:
            break
        nucleus[token] = law[token]
    return {token: p / sum(nucleus.values()) for token, p in nucleus.items()}


def draw(
    laws: ExactLaws,
    prefixes: Sequence[tuple[int, ...]],
    experiment: Experiment,
    *,
    num_draws: int,
    seed: int,
    watch: Watch,
    tick: Callable[[], None] = lambda: None,
) -> Tallies:
    """Draw ``length`` or more tokens after each prefix, ``num_draws`` times in all, and count what came."""
    tallies = Tallies()
    for number, prefix in enumerate(prefixes):
        seeds = seed_stream(fold(seed, 1 + number), 2 + experiment.number)
        most = experiment.num_drafted + experiment.room
        engine = _engine(laws.memo, experiment, len(prefix) + most + 2, seeds)
        coupled = experiment.rule == "coupled"
        for _ in range(num_draws // len(prefixes)):
            queue(
                engine,
                prefix,
                SamplingParams(
                    temperature=laws.temperature,
                    top_k=laws.top_k,
                    top_p=laws.top_p,
                    max_tokens=most,
                    ignore_eos=True,
                    seed=seeds() if coupled else None,
                ),
            )
        drive(engine, watch, _Counter(engine, laws, tallies, experiment, tick))
    return tallies


def _engine(memo: MemoLM, experiment: Experiment, longest: int, seeds: Callable[[], int]) -> Engine:
    options = EngineOptions(
        max_num_seqs=SEATS, max_model_len=min(memo.info.context, longest), num_pages=SEATS * (longest // 16 + 4)
    )

    def build(setting: Setting) -> Witness:
        return Witness(experiment.build(setting))

    rule: Rule = "rejection" if experiment.rule == "coupled" else experiment.rule  # coupled comes with the seed
    return Engine(memo, build, options, rule=rule, num_speculative_tokens=experiment.num_drafted, entropy=seeds)


class _Counter:
    """Sorts each step of each draw into the tallies, and ends a draw when its text is long enough."""

    def __init__(
        self, engine: Engine, laws: ExactLaws, tallies: Tallies, experiment: Experiment, tick: Callable[[], None]
    ):
        assert isinstance(engine.drafter, Witness)
        self.engine, self.witness, self.laws, self.tallies = engine, engine.drafter, laws, tallies
        self.rule, self.length, self.tick = experiment.rule, experiment.length, tick

    def __call__(self, event: Event) -> None:
        if not event.tokens:
            return
        request, tallies = event.request, self.tallies
        draft = self.witness.take(request).first(event.num_drafted)
        start = len(request.tokens) - len(event.tokens)
        path = join(request.source, request.tokens[:start])
        tallies.num_drafted += event.num_drafted
        tallies.num_accepted += event.num_accepted
        if start == request.num_prompt:
            tallies.first.add(path, self.laws.after(path), event.tokens[0])
        if len(draft) and draft.is_chain:
            self._count_classes(path, draft, event)
        if request.num_output >= self.length:
            tally = tallies.pair if self.length == 2 else tallies.text
            prompt = join(request.source, request.prompt)
            law = self.laws.joint(prompt, self.length)
            tally.add(prompt, law, tuple(request.output[: self.length]))
            self.engine.abort(request)
            self.tick()

    def _count_classes(self, path: tuple[int, ...], draft: Draft, event: Event) -> None:
        for depth, token in enumerate(event.tokens):
            p = self.laws.after(path)
            if depth == len(draft):
                self.tallies.bonus.add(path, p, token)
            elif self.rule == "rejection":
                q = _chances(draft, depth, p)
                both = {x: min(p[x], q[x]) for x in p}
                rest = max(1.0 - sum(both.values()), _ROUNDING)
                stratum = (path, tuple(q.values()))
                accepted = depth < event.num_accepted
                self.tallies.accepted.add(
                    stratum, dict[Any, float](both) | {_REJECTED: rest}, token if accepted else _REJECTED
                )
                if not accepted and rest > 10 * _ROUNDING:  # of equal laws only rounding is left
                    self.tallies.residual.add(stratum, {x: (p[x] - both[x]) / rest for x in p}, token)
            path = (*path, token)


def _chances(draft: Draft, depth: int, p: Mapping[int, float]) -> dict[int, float]:
    """The law that the draft's token at this depth is said to be drawn from, where p is not 0."""
    if draft.probs is None:
        return {x: float(x == draft.tokens[depth]) for x in p}
    return dict(zip(p, draft.probs[depth, list(p)].double().tolist(), strict=True))


def uncertain_prefixes(laws: ExactLaws, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[int, ...]]:
    """Every place in these (prompt, output) pairs where a token was decided, those with the widest law first.

    Where the law is a near certainty no test can tell anything, so draws are spent where there is a choice.
    """
    widths: dict[tuple[int, ...], float] = {}
    for prompt, output in texts:
        whole = (*prompt, *output)
        laws.memo.read(whole[:-1], len(output))
        for end in range(len(prompt), len(whole)):
            p = torch.tensor(list(laws.after(whole[:end]).values()), dtype=torch.float64)
            widths[whole[:end]] = float(torch.special.entr(p).sum())
    return sorted(widths, key=lambda prefix: -widths[prefix])

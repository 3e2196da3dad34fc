"""alpha, as in the paper's Table 3: the mean over places of the target's own text of sum_x min(p(x), q(x)).

It does not know which drafters there are. The one trick: while the target writes plainly, all drafters are asked at
every place for one token, and none is listened to (`Shadow`). So the text is the target's alone, every drafter meets
every place of it, and what is asked is the very code that drafts.

At temperature 0 p and q are the likeliest tokens, and a place counts 1 if they are the same. A drafter that chooses its
token x instead of drawing it has q(x) = 1, and its place counts p(x).

Beside alpha there are chances of runs. With x the token that the target wrote at a place, r = min(1, q(x) / p(x)); then
the mean over places of r_1 r_2 ... r_k is the chance that a draft of k tokens is accepted whole, for

    sum over x_1 ... x_k of prod p(x_i) min(1, q(x_i) / p(x_i))  =  sum over x_1 ... x_k of prod min(p(x_i), q(x_i))

where each q is the drafter's after the text so far. Of a draft model that is so in drafting too; drafters that read the
target's states see less of it, the further ahead they guess.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..decoding.draft import EMPTY, Draft
from ..decoding.request import Request, Step
from ..decoding.sampling import SamplingParams, warp
from ..drafters.base import Drafter, Setting
from ..engine.engine import Engine, Event
from ..engine.options import EngineOptions
from ..models.base import CausalLM, ModelOutput
from ..models.load import Loaded
from ..paged.batch import Batch
from ..paged.cache import KVCache

LONGEST_RUN = 8
Builders = Mapping[str, Callable[[Setting], Drafter]]


@dataclass(slots=True)
class Tally:
    """Sums over places. shared: of sum min(p, q); runs[k - 1]: products of k neighbouring r, and how many there are."""

    num_places: int = 0
    shared: float = 0.0
    runs: list[list[float]] = field(default_factory=lambda: [[0.0, 0] for _ in range(LONGEST_RUN)])

    def note(self, shared: float) -> None:
        self.num_places += 1
        self.shared += shared

    def note_text(self, chances: Sequence[float]) -> None:
        """r at each place of one text."""
        for length in range(1, LONGEST_RUN + 1):
            for start in range(len(chances) - length + 1):
                product = 1.0
                for chance in chances[start : start + length]:
                    product *= chance
                self.runs[length - 1][0] += product
                self.runs[length - 1][1] += 1

    def merge(self, other: "Tally") -> None:
        self.num_places += other.num_places
        self.shared += other.shared
        self.runs = [[a + c, b + d] for (a, b), (c, d) in zip(self.runs, other.runs, strict=True)]

    @property
    def alpha(self) -> float:
        return self.shared / self.num_places if self.num_places else float("nan")

    def expected_tokens(self, num_drafted: int) -> float | None:
        """Tokens a pass by the chances of runs; None if K is beyond what was counted."""
        wanted = self.runs[:num_drafted]
        if num_drafted > LONGEST_RUN or not all(count for _, count in wanted):
            return None
        return 1 + sum(total / count for total, count in wanted)


class Shadow(Drafter):
    """Asks all, proposes nothing. guesses: {drafter: {request: the token it would draft, and q if it was drawn}}."""

    def __init__(self, drafters: Mapping[str, Drafter]):
        self.drafters = dict(drafters)
        self.taps = sorted({layer for drafter in drafters.values() for layer in drafter.taps})
        self.guesses: dict[str, dict[str, tuple[int, Tensor | None]]] = {}

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        for name, drafter in self.drafters.items():
            drafts = drafter.propose(requests, [1] * len(requests))
            self.guesses[name] = {
                request.id: (draft.tokens[0], None if draft.probs is None else draft.probs[0])
                for request, draft in zip(requests, drafts, strict=True)
                if len(draft)
            }
        return [EMPTY] * len(requests)

    def observe(self, steps: Sequence[Step], taps: Mapping[int, Tensor]) -> None:
        for drafter in self.drafters.values():
            drafter.observe(steps, taps)

    def release(self, request: Request) -> None:
        for drafter in self.drafters.values():
            drafter.release(request)


class _Heard:
    """The target, with the logits of its last pass kept: {sequence: [V]}."""

    def __init__(self, model: CausalLM):
        self.model, self.info = model, model.info
        self.new_cache, self.ends = model.new_cache, model.ends
        self.logits: dict[str, Tensor] = {}

    def forward(self, batch: Batch, cache: KVCache, **options: Any) -> ModelOutput:
        output = self.model.forward(batch, cache, **options)
        wanted = [span.feed.sequence for span in batch.spans if span.feed.num_wanted]
        assert len(wanted) == len(output.logits_NV), "plain decoding wants one row a sequence"
        self.logits = dict(zip(wanted, output.logits_NV, strict=True))
        return output


@dataclass(frozen=True, slots=True)
class Text:
    """What the target wrote. prompt, ids: tokens."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]


def tally(
    target: Loaded,
    builders: Builders,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_tokens: int,
    seed: int,
    max_num_seqs: int = 16,
) -> tuple[dict[str, Tally], list[Text]]:
    """Let the target answer these prompts, and judge these drafters on what it writes.

    seed: of all chance. The last token that an answer has room for is no place, and drafters that wait for the target's
    states have none at the first. Raises DraftError for a drafter that does not fit.
    """
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    shadow: list[Shadow] = []

    def build(setting: Setting) -> Shadow:
        shadow.append(Shadow({name: make(setting) for name, make in builders.items()}))
        return shadow[0]

    heard = _Heard(target.model)
    beginnings = [target.model.info.opening(prompt)[1] for prompt in prompts]
    options = EngineOptions(
        max_num_seqs=min(max_num_seqs, len(prompts)),
        max_model_len=max(map(len, beginnings)) + max_tokens,
        enable_prefix_caching=False,
    )
    draws = torch.Generator().manual_seed(seed)
    engine = Engine(
        heard,
        build,
        options,
        tokenizer=target.tokenizer,
        num_speculative_tokens=1,
        entropy=lambda: int(torch.randint(1 << 62, (), generator=draws)),
    )
    requests = [request for prompt in prompts for request in engine.add(prompt, params)]
    found = {name: Tally() for name in builders}
    chances: dict[tuple[str, str], list[float]] = {}
    while engine.has_work:
        shadow[0].guesses = {}
        for event in engine.step():
            _judge(event, heard, shadow[0], params, found, chances)
    assert engine.num_failed_drafts == 0, "a drafter failed, and its places are missing"
    for (name, _), row in chances.items():
        found[name].note_text(row)
    return found, [Text(tuple(p), tuple(r.output)) for p, r in zip(prompts, requests, strict=True)]


def _judge(
    event: Event,
    heard: _Heard,
    shadow: Shadow,
    params: SamplingParams,
    found: dict[str, Tally],
    chances: dict[tuple[str, str], list[float]],
) -> None:
    """One request's step: the law that its token came from, against every guess."""
    own = event.request.id
    guesses = {name: given[own] for name, given in shadow.guesses.items() if own in given}
    if not guesses or not event.tokens:
        return
    (said,) = event.tokens
    p_V = None if params.greedy else warp(heard.logits[own][None], params)[0]
    for name, (token, q_V) in guesses.items():
        if p_V is None:
            shared = chance = float(token == said)
        elif q_V is None:
            shared, chance = float(p_V[token]), float(token == said)
        else:
            shared = float(p_V.minimum(q_V).sum())
            chance = min(1.0, float(q_V[said]) / float(p_V[said]))
        found[name].note(shared)
        chances.setdefault((name, own), []).append(chance)

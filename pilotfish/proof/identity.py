"""Token for token: the text with drafting against the text without; and a draft that is the target itself.

It does not know laws or statistics. The one trick: sampled texts can be compared like greedy ones, because under
``coupled`` a text is a function of model and seed alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from torch import Tensor

from ..bench.divergence import first_difference
from ..decoding.draft import Draft
from ..decoding.paths import join, split
from ..decoding.request import FinishReason, Request
from ..decoding.sampling import SamplingParams
from ..drafters.draft_model import DraftModelDrafter
from ..engine.engine import Engine, Event
from .actors import Witness
from .ground import TYPICAL_DRAFT, Ground, drive, queue
from .report import Check
from .rounding import Divergence, can_round, divergence, plausible, row_in_shapes, spread

SELF_PROMPTS, SELF_TOKENS, SELF_DRAFTED = 2, 24, 3
SHAPED_PROMPTS, SHAPED_TEMPERATURE = 2, 0.7
LEAST_SELF_ACCEPTANCE = 0.999
_SELF_BESIDE = SELF_PROMPTS * (1 + SELF_DRAFTED) - 1  # rows of its verification passes beside any one of them


@dataclass(frozen=True, slots=True)
class Shape:
    """More parameters of a text: all that depends on the tokens before a row, and with ``warped`` all of `warp`."""

    name: str
    warped: bool

    def of(self, ground: Ground, prompt: Sequence[int], params: SamplingParams) -> SamplingParams:
        """Bias falls on ids of the prompt, which the text is likely to meet again."""
        ids = {token for part in split(prompt) for token in part}
        return replace(
            params,
            repetition_penalty=1.2,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            logit_bias={token: (-1.0, 1.0)[number % 2] for number, token in enumerate(sorted(ids)[:4])},
            min_tokens=(params.max_tokens + 1) // 2,
            top_p=0.9 if self.warped else 1.0,
            min_p=0.02 if self.warped else 0.0,
        )


PENALTIES, EVERYTHING = Shape("with penalties", False), Shape("with every parameter", True)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A check with the divergences behind it, and the plain texts it compared with (token ids, per prompt).
    num_drafted, num_accepted: tokens, by the method under test."""

    check: Check
    divergences: tuple[Divergence, ...] = ()
    texts: tuple[tuple[int, ...], ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def num_near_ties(self) -> int:
        return sum(found.near_tie for found in self.divergences)


def compare(ground: Ground, temperature: float, shape: Shape | None = None) -> Outcome:
    """Decode every prompt alone and plainly, then with drafting, in batches and alone, and compare.

    shape: more parameters, for the first prompts only, and with the target as its own draft as well.
    """
    prompts = ground.prompts[: SHAPED_PROMPTS if shape else None]
    all_params = [ground.params(number, temperature) for number in range(len(prompts))]
    if shape:
        all_params = [shape.of(ground, prompt, params) for prompt, params in zip(prompts, all_params, strict=True)]
    plain = []
    for prompt, params in zip(
        prompts, all_params, strict=True
    ):  # one at a time: the text as it is with nothing beside it
        engine = ground.plain_engine()
        plain += queue(engine, prompt, params)
        drive(engine, ground.watch, lambda event: ground.meter.tick(len(event.tokens)))
    drafted = list[Request]()
    # A method that is seldom right would hardly show how the rows deep in a draft are shaped; the target itself does.
    for engine in (ground.engine(), _self_drafting(ground)[0] if shape else _alone(ground)):
        for prompt, params in zip(prompts, all_params, strict=True):
            drafted += queue(engine, prompt, params)
        drive(engine, ground.watch, lambda event: ground.meter.tick(len(event.tokens)))
    broken = [str(request.error) for request in (*plain, *drafted) if request.finish == FinishReason.ERROR]
    found = [
        divergence
        for one, other in zip(cycle(plain), drafted, strict=False)
        if (divergence := _first_divergence(ground, one, other)) is not None
    ]
    faults = [f"prompt error: {error}" for error in broken] + [str(one) for one in found if not one.near_tie]
    near_ties = [str(one) for one in found if one.near_tie]
    num_tokens = sum(request.num_output for request in plain)
    check = Check(
        f"text at temperature {temperature:g}"
        + (f" {shape.name}" if shape else "")
        + (" (seeded)" if temperature else ""),
        not faults,
        len(faults),
        0,
        "; ".join(
            [
                f"{len(plain)} prompts, {num_tokens} tokens, {_seats(ground, shape)}; {_drafting(drafted)}",
                *faults,
                *near_ties,
            ]
        ),
        "a text with drafting is not the text without it",
    )
    own = _num_drafted(drafted[: len(prompts)] if shape else drafted)
    return Outcome(check, tuple(found), () if shape else tuple(tuple(request.output) for request in plain), *own)


def draft_with_itself(ground: Ground, temperature: float) -> Outcome:
    """The target drafts for itself: greedy and seeded, every guess must be accepted."""
    found: list[Divergence] = []
    num_accepted = 0

    def look(event: Event) -> None:
        nonlocal num_accepted
        draft = witness.take(event.request)
        num_accepted += event.num_accepted
        if _rejected(event):
            found.append(_rejection(ground, event, draft))

    engine, witness = _self_drafting(ground)
    for number, prompt in enumerate(ground.prompts[:SELF_PROMPTS]):
        queue(engine, prompt, ground.params(number, temperature, min(SELF_TOKENS, ground.options.max_tokens)))
    drive(engine, ground.watch, look)
    faults = [one for one in found if not one.near_tie]
    judged = num_accepted + len(faults)
    rate = num_accepted / judged if judged else 0.0
    check = Check(
        f"target as its own draft, temperature {temperature:g}" + (" (seeded)" if temperature else ""),
        rate == 1.0,
        rate,
        1.0,
        "; ".join([f"{num_accepted} accepted", *map(str, found)]),
        "a draft equal to the target is not always accepted: caches of draft and target do not hold the same text",
    )
    return Outcome(check, tuple(found))


def same_in_any_shape(ground: Ground) -> Check:
    """The row after each prompt from passes of different shapes: equal up to what the number format explains."""
    found = []
    for prompt in ground.prompts[:SELF_PROMPTS]:
        rows = [row.double() for row in _rows_after(ground, prompt)]
        found.append((spread(rows), plausible(ground.model, rows[0])))
    worst, threshold = max(found, key=lambda pair: pair[0] - pair[1])
    return Check(
        "a row in passes of other shapes",
        worst <= threshold,
        worst,
        threshold,
        "largest difference of a logit: a row alone, with drafted rows, and after a text read in chunks",
        "what else is in a pass changes a row by more than rounding, so drafts change the text",
    )


def draft_with_itself_unseeded(ground: Ground) -> Outcome:
    """The same by rejection sampling, where the chance of acceptance is sum min(p, q): 1 up to rounding."""
    num_accepted = num_rejected = 0

    def look(event: Event) -> None:
        nonlocal num_accepted, num_rejected
        witness.take(event.request)
        num_accepted += event.num_accepted
        num_rejected += _rejected(event)

    engine, witness = _self_drafting(ground)
    prompts = ground.prompts[:SELF_PROMPTS]
    for prompt in prompts:
        queue(engine, prompt, SamplingParams(max_tokens=min(SELF_TOKENS, ground.options.max_tokens)))
    drive(engine, ground.watch, look)
    judged = num_accepted + num_rejected
    rate = num_accepted / judged if judged else 0.0
    distance = max(_distance_by_rounding(ground, prompt) for prompt in prompts)
    threshold = min(LEAST_SELF_ACCEPTANCE, 1 - 4 * distance)
    check = Check(
        "target as its own draft, rejection",
        rate >= threshold,
        rate,
        threshold,
        f"{num_accepted} of {judged} accepted; rounding alone moves {distance:.1e} of the mass",
        "a draft equal to the target is rejected more often than rounding explains: q is not what was drawn from",
    )
    return Outcome(check)


def _self_drafting(ground: Ground) -> tuple[Engine, Witness]:
    engine = ground.engine(
        lambda setting: Witness(DraftModelDrafter(ground.model, setting)), num_drafted=SELF_DRAFTED, rule="rejection"
    )
    assert isinstance(engine.drafter, Witness)
    return engine, engine.drafter


def _rejected(event: Event) -> bool:
    """Whether the target disagreed; a text that ended inside an accepted run did not disagree."""
    return event.num_accepted < event.num_drafted and len(event.tokens) > event.num_accepted


def _first_divergence(ground: Ground, plain: Request, drafted: Request) -> Divergence | None:
    one, other = plain.output, drafted.output
    same = first_difference(one, other)
    if same is None:
        return None
    return divergence(
        ground.model,
        join(plain.source, [*plain.prompt, *one[:same]]),
        plain.num_prompt,
        one[same:],
        other[same:],
        ground.num_beside,
        params=plain.params,
        seed=plain.seed,
        stop_ids=plain.stop_ids,
    )


def _rejection(ground: Ground, event: Event, draft: Draft) -> Divergence:
    """The emitted token against the guess that it replaced."""
    request = event.request
    return divergence(
        ground.model,
        join(request.source, request.tokens[:-1]),
        request.num_prompt,
        request.tokens[-1:],
        draft.tokens[event.num_accepted :],
        _SELF_BESIDE,
        params=request.params,
        seed=request.seed,
        stop_ids=request.stop_ids,
    )


def _distance_by_rounding(ground: Ground, prompt: Sequence[int]) -> float:
    """Total variation between the laws after a prompt from passes of different shapes."""
    if not can_round(ground.model):
        return 0.0
    laws = [row.double().softmax(0) for row in _rows_after(ground, prompt)]
    return max(float((law - laws[0]).abs().sum()) / 2 for law in laws)


def _rows_after(ground: Ground, prompt: Sequence[int]) -> list[Tensor]:
    source, tokens = split(prompt)
    return row_in_shapes(ground.model, prompt, len(tokens) // 2, source or tokens, _SELF_BESIDE)


def _alone(ground: Ground) -> Engine:
    """A controller may find that nothing pays here; so that much is drafted all the same, the number is fixed."""
    return ground.engine(num_seats=1, num_drafted=TYPICAL_DRAFT if ground.num_drafted == "auto" else None)


def _seats(ground: Ground, shape: Shape | None) -> str:
    return f"in batches of {ground.num_seats}" + ("" if shape else " and alone")


def _drafting(requests: Sequence[Request]) -> str:
    drafted, accepted = _num_drafted(requests)
    return f"{accepted} of {drafted} drafted tokens accepted" if drafted else "nothing was drafted"


def _num_drafted(requests: Sequence[Request]) -> tuple[int, int]:
    """(drafted, accepted)."""
    drafted = sum(sum(request.stats.per_step_drafted) for request in requests)
    return drafted, sum(sum(request.stats.per_step_accepted) for request in requests)

"""From logits to verdicts: warp each request's rows, apply its rule, read off log-probabilities.

It does not know caches, the scheduler or where drafts came from. The one trick: all greedy rows of a batch share one
argmax and one transfer, whatever requests they belong to; only sampled requests cost more.
"""

import math
from collections.abc import Callable, Sequence, Set
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..decoding.draft import Draft
from ..decoding.hearing import Hearing, Witness, hear, hear_choices
from ..decoding.noise import SeededNoise
from ..decoding.request import Request, TokenLogprob
from ..decoding.sampling import Likeliest, SamplingParams, likeliest, process, warp
from ..decoding.verify import Verdict, match, verify
from ..errors import PilotfishError

Judgement = tuple[Verdict, list[TokenLogprob]]
Hearings = dict[str, Callable[[], Hearing]]  # by the request's id; put together when called, outside of what is timed


def judge(
    requests: Sequence[Request],
    drafts: Sequence[Draft],
    logits_NV: Tensor,
    hearings: Hearings | None = None,
    best: Likeliest | None = None,
) -> list[Judgement | PilotfishError]:
    """One verdict per request, with log-probabilities where asked for.

    logits_NV: the rows of all requests end to end, ``len(draft) + 1`` each. A request whose law is broken (NaN from
    the model) gets an error instead; the others are not touched.
    best: `likeliest` of the logits, if it is known.
    hearings: if given, gets what each verdict was based on, by the request's id.
    """
    greedy_rows: list[int] = []
    greedy_values: list[float] = []
    if any(_plainly_greedy(request) for request in requests):
        greedy_rows, greedy_values = likeliest(logits_NV) if best is None else best
    results: list[Judgement | PilotfishError] = []
    start = 0
    for request, draft in zip(requests, drafts, strict=True):
        stop = start + len(draft) + 1
        if _plainly_greedy(request):
            broken = [math.isnan(value) for value in greedy_values[start:stop]]
            verdict = _match_choices(draft, greedy_rows[start:stop])
            results.append(_broken(request) if broken[0] else (_before_broken(draft, verdict, broken), []))
            if hearings is not None and not broken[0]:
                choices = greedy_rows[start:stop]
                hearings[request.id] = _hear_choices(request, draft, logits_NV[start:stop], choices, verdict)
        else:
            results.append(_judge_one(request, draft, logits_NV[start:stop], hearings))
        start = stop
    assert start == len(greedy_rows or logits_NV), "one row per pending token and node"
    return results


def _match_choices(draft: Draft, choices: Sequence[int]) -> Verdict:
    return match(draft, lambda row, _depth: choices[row])


def _plainly_greedy(request: Request) -> bool:
    params = request.params
    return params.greedy and not params.processed and params.logprobs is None and request.constraint is None


def _hear_choices(
    request: Request, draft: Draft, logits_NV: Tensor, choices: Sequence[int], verdict: Verdict
) -> Callable[[], Hearing]:
    return partial(hear_choices, request.seed, len(request.tokens), draft, logits_NV, choices, verdict)


def _judge_one(
    request: Request, draft: Draft, logits_NV: Tensor, hearings: Hearings | None
) -> Judgement | PilotfishError:
    params = request.params
    outputs = request.row_outputs(draft) if params.processed else ()
    try:
        allowed_NV = None if request.constraint is None else request.constraint.masks(draft)
    except PilotfishError as error:  # it grew beyond its limits: this request's misfortune alone
        return PilotfishError(f"request {request.id}: {error}")
    context = (params, request.prompt, outputs, request.stop_ids, allowed_NV)
    if params.greedy:
        processed_NV = process(logits_NV, *context)
        choices, values = likeliest(processed_NV)
        broken = [math.isnan(value) or value == -math.inf for value in values]  # -inf: every id is forbidden
        verdict = _match_choices(draft, choices)
        if hearings is not None and not broken[0]:
            hearings[request.id] = _hear_choices(request, draft, processed_NV, choices, verdict)
    else:
        noise = (SeededNoise if hearings is None else Witness)(request.seed, len(request.tokens))
        if request.rule != "block" and hearings is None and params.logprobs is None and logits_NV.device.type == "cpu":
            laws = _LazyLaws(logits_NV, *context)
            verdict, broken = verify(draft, laws, request.rule, noise), laws.broken
        else:
            p_NV, broken = _repaired(warp(logits_NV, *context))
            verdict = verify(draft, p_NV, request.rule, noise)
        if hearings is not None and isinstance(noise, Witness) and not broken[0]:
            hearings[request.id] = partial(hear, noise, request.rule, draft, p_NV, verdict)
    if broken[0]:
        return _broken(request)
    verdict = _before_broken(draft, verdict, broken)
    if params.logprobs is None:
        return verdict, []
    if params.logprobs_mode == "raw_logprobs":
        logprobs_NV = torch.log_softmax(logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float(), 1)
    else:
        logprobs_NV = torch.log_softmax(processed_NV, 1) if params.greedy else p_NV.log()
    return verdict, _logprobs(logprobs_NV, draft, verdict, params.logprobs)


class _LazyLaws:
    """What `warp` makes of each row, when it is looked at: a rule sees the accepted path alone, and on a CPU a softmax
    over a vocabulary takes a percent of a pass. broken: of rows seen, whether their law was."""

    def __init__(
        self,
        logits_NV: Tensor,
        params: SamplingParams,
        prompt: Sequence[int],
        outputs: Sequence[Sequence[int]],
        stop_ids: Set[int],
        allowed_NV: Tensor | None,
    ):
        self.logits_NV, self.params, self.prompt, self.outputs = logits_NV, params, prompt, outputs
        self.stop_ids, self.allowed_NV = stop_ids, allowed_NV
        self.broken = [False] * len(logits_NV)
        self._made: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.logits_NV)

    def __getitem__(self, row: int) -> Tensor:
        row %= len(self)
        if row not in self._made:
            own = slice(row, row + 1)
            allowed_1V = None if self.allowed_NV is None else self.allowed_NV[own]
            p_1V, (self.broken[row],) = _repaired(
                warp(self.logits_NV[own], self.params, self.prompt, self.outputs[own], self.stop_ids, allowed_1V)
            )
            self._made[row] = p_1V[0]
        return self._made[row]


def _repaired(p_NV: Tensor) -> tuple[Tensor, list[bool]]:
    """Which laws are broken (NaN); any law will do there, for the verdict is cut before it."""
    on_cpu = p_NV.device.type == "cpu"
    broken = (np.isnan(p_NV.numpy().sum(1)) if on_cpu else p_NV.sum(1).isnan()).tolist()
    if any(broken):
        p_NV = torch.where(torch.tensor(broken, device=p_NV.device)[:, None], 1 / p_NV.shape[1], p_NV)
    return p_NV, broken


def _before_broken(draft: Draft, verdict: Verdict, broken: Sequence[bool]) -> Verdict:
    """The verdict up to the first accepted node behind which the law is broken: a draft cannot fail a request. If that
    is the request's own text, the next pass meets it as plain decoding would."""
    for length, node in enumerate(verdict.path):
        if broken[node + 1]:
            return Verdict(verdict.path[:length], draft.tokens[node])
    return verdict


def _broken(request: Request) -> PilotfishError:
    return PilotfishError(f"request {request.id}: the model's logits are not numbers (NaN), or all ids are forbidden")


def _logprobs(logprobs_NV: Tensor, draft: Draft, verdict: Verdict, num_top: int) -> list[TokenLogprob]:
    """Read each emitted token's value in the row that decided it."""
    rows = [0, *(node + 1 for node in verdict.path)]
    tokens = [*(draft.tokens[node] for node in verdict.path), verdict.token]
    chosen = logprobs_NV[rows, tokens].tolist()
    top: list[tuple[tuple[int, float], ...]] = [()] * len(rows)
    if num_top:
        values, ids = logprobs_NV[rows].topk(min(num_top, logprobs_NV.shape[1]), dim=1)
        top = [tuple(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return [TokenLogprob(*row) for row in zip(tokens, chosen, top, strict=True)]

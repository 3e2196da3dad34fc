"""Verdicts from rows of logits: one argmax for all greedy rows, log-probabilities where asked for, NaN kept apart."""

import dataclasses
import math

import pytest
import torch

from pilotfish.decoding.draft import EMPTY, Draft, chain
from pilotfish.decoding.request import Request
from pilotfish.decoding.sampling import SamplingParams, process, warp
from pilotfish.decoding.verify import Verdict
from pilotfish.engine.judge import judge
from pilotfish.errors import PilotfishError
from tests.adversaries import foresight, random_trees
from tests.fakes import TableModel, drain, engine, oracle

NUM_IDS = 6
LOGITS = torch.randn(12, NUM_IDS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CHOICES = LOGITS.argmax(1).tolist()


def request(params: SamplingParams, rule: str = "coupled", prompt: tuple[int, ...] = (1, 2)) -> Request:
    return Request("r", prompt, params, seed=3, rule=rule, max_length=99)  # type: ignore[arg-type]


def test_each_request_gets_its_own_rows():
    greedy, seeded = SamplingParams(temperature=0), SamplingParams(seed=3)
    drafts = [EMPTY, chain(CHOICES[1:3]), chain([0, 1]), chain(CHOICES[7:8])]
    requests = [request(greedy), request(greedy), request(seeded), request(greedy)]
    together = judge(requests, drafts, LOGITS[:9])
    start = 0
    for r, draft, result in zip(requests, drafts, together, strict=True):
        (alone,) = judge([r], [draft], LOGITS[start : start + len(draft) + 1])
        assert alone == result
        start += len(draft) + 1
    assert together[0] == (Verdict((), CHOICES[0]), [])
    assert together[1] == (Verdict((0, 1), CHOICES[3]), [])
    assert together[3] == (Verdict((0,), CHOICES[8]), [])


def test_the_wrong_number_of_rows_is_our_mistake():
    with pytest.raises(AssertionError, match="one row per pending token and node"):
        judge([request(SamplingParams(temperature=0))], [EMPTY], LOGITS[:2])


@pytest.mark.parametrize("where", range(3))
@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0, "logprobs": 1}, {}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_nan_counts_only_where_the_text_goes(rule, params, where):
    """Row 0 fails the request; behind an accepted guess the verdict ends with that guess; elsewhere it is not seen."""
    logits_NV = LOGITS[:3].clone()
    logits_NV[:, 0] += 30  # 0 is said, and guessed
    sound = judge([request(SamplingParams(**params), rule)], [chain([0, 0])], logits_NV)[0]
    logits_NV[where] = math.nan
    (result, other) = judge(
        [request(SamplingParams(**params), rule), request(SamplingParams(temperature=0))],
        [chain([0, 0]), EMPTY],
        torch.cat([logits_NV, LOGITS[:1]]),
    )
    assert not isinstance(sound, PilotfishError) and sound[0] == Verdict((0, 1), 0)
    assert other == (Verdict((), CHOICES[0]), [])
    if where == 0:
        assert isinstance(result, PilotfishError) and "NaN" in str(result)
    else:
        assert not isinstance(result, PilotfishError)
        assert result[0] == Verdict((0,)[: where - 1], 0)
        assert [entry.token for entry in result[1]] == ([0] * where if "logprobs" in params else [])
        assert all(math.isfinite(entry.logprob) for entry in result[1])
    aside = judge([request(SamplingParams(**params), rule)], [Draft((1, 2), (-1, 0))], logits_NV)[0]
    assert isinstance(aside, PilotfishError) == (where == 0)
    if where:
        assert aside[0] == Verdict((), 0)


def test_no_id_left_to_say_is_an_error():
    everything = dict.fromkeys(range(NUM_IDS), -math.inf)
    (result,) = judge([request(SamplingParams(logit_bias=everything))], [EMPTY], LOGITS[:1])
    assert isinstance(result, PilotfishError) and "all ids are forbidden" in str(result)


# -- log-probabilities ----------------------------------------------------------------------------------------------

MODEL = TableModel(16, order=2, num_phases=3)
WARPED = [
    SamplingParams(temperature=0, logprobs=3, max_tokens=14),
    SamplingParams(temperature=0, logprobs=0, max_tokens=14, presence_penalty=1.0, min_tokens=5, stop_token_ids=[2]),
    SamplingParams(seed=1, logprobs=2, max_tokens=14),
    SamplingParams(seed=2, logprobs=20, max_tokens=14, temperature=0.6, top_k=4, repetition_penalty=1.2),
]


@pytest.mark.parametrize("params", WARPED, ids=range(len(WARPED)))
def test_log_probabilities_are_the_target_s_own_after_warping(params):
    """One per token, the same whatever drafts, and equal to what the table says."""
    prompt, seen = [3, 1, 4], []
    for drafter in (None, foresight(MODEL), random_trees(16, MODEL.law)):
        found = engine(MODEL, drafter, k=5)
        (done,) = found.add(prompt, params)
        drain(found)
        assert tuple(done.output) == oracle(MODEL.logits_of, prompt, params)
        assert [entry.token for entry in done.logprobs] == done.output
        seen.append(done.logprobs)
    assert seen[0] == seen[1] == seen[2]
    for i, entry in enumerate(seen[0]):
        output = [e.token for e in seen[0][:i]]
        context = (params, prompt, [output], set(params.stop_token_ids))
        logits_NV = MODEL.logits_of([*prompt, *output])[None]
        if params.greedy:
            law_V = torch.log_softmax(process(logits_NV, *context), 1)[0]
        else:
            law_V = warp(logits_NV, *context)[0].log()
        assert entry.logprob == pytest.approx(float(law_V[entry.token]))
        values, ids = law_V.topk(min(params.logprobs, 16))
        assert [value for _, value in entry.top] == pytest.approx(values.tolist())
        finite = [token for token, value in entry.top if math.isfinite(value)]
        assert finite == ids.tolist()[: len(finite)]
        assert len(entry.top) == min(params.logprobs, 16)


@pytest.mark.parametrize("params", WARPED, ids=range(len(WARPED)))
def test_raw_log_probabilities_are_those_of_the_model_s_own_law(params):
    """Whatever bias, penalties and temperature do to the law that is sampled from, and whatever drafts."""
    params = dataclasses.replace(params, logit_bias={5: 3.0}, logprobs_mode="raw_logprobs")
    prompt, seen = [3, 1, 4], []
    for drafter in (None, foresight(MODEL), random_trees(16, MODEL.law)):
        found = engine(MODEL, drafter, k=5)
        (done,) = found.add(prompt, params)
        drain(found)
        assert tuple(done.output) == oracle(MODEL.logits_of, prompt, params)
        seen.append(done.logprobs)
    assert seen[0] == seen[1] == seen[2]
    for i, entry in enumerate(seen[0]):
        law_V = MODEL.law([*prompt, *(e.token for e in seen[0][:i])]).log()
        assert entry.logprob == pytest.approx(float(law_V[entry.token]))
        assert [value for _, value in entry.top] == pytest.approx(law_V.topk(min(params.logprobs, 16)).values.tolist())


@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 1}, {}], ids=str)
def test_when_every_id_is_forbidden_nothing_can_be_said(params):
    """Not even by the argmax, which would name id 0."""
    found = engine(MODEL)
    (none,) = found.add([3, 1], SamplingParams(logit_bias=dict.fromkeys(range(16), -math.inf), **params))
    (one,) = found.add([3, 1], SamplingParams(logit_bias=dict.fromkeys(range(15), -math.inf), max_tokens=3, **params))
    drain(found)
    assert (str(none.finish), none.output) == ("error", [])
    assert "all ids are forbidden" in none.error
    assert one.output == [15, 15, 15]

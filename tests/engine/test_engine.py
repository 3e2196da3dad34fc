"""The engine when something goes wrong: a drafter, a model, a request, the user's patience. Nobody else may notice."""

import math
from typing import Any

import pytest
import torch

from pilotfish.decoding.draft import Draft, chain
from pilotfish.decoding.sampling import SamplingParams
from pilotfish.drafters.base import Drafter
from pilotfish.engine.engine import Engine
from pilotfish.engine.memory import bytes_per_token, size_pool
from pilotfish.engine.options import EngineOptions
from pilotfish.errors import CapacityError, OptionError, PromptError
from tests.adversaries import Faulty, Scripted, foresight, guesser, random_trees, sampled_chain
from tests.fakes import TableModel, drain, engine, oracle, run

MODEL = TableModel(16, order=2, num_phases=3)
GREEDY = SamplingParams(temperature=0, max_tokens=12)
SEEDED = SamplingParams(seed=4, max_tokens=12)
TEXT = {params: oracle(MODEL.logits_of, [3, 1], params) for params in (GREEDY, SEEDED)}
assert len(set(TEXT.values())) == 2


# -- drafters -------------------------------------------------------------------------------------------------------

UNIFORM = torch.full((3, 16), 1 / 16, dtype=torch.float64)
BAD_DRAFTS = {
    "ids beyond the table": lambda: chain([1, 16]),
    "negative ids": lambda: chain([-1]),
    "laws over another table": lambda: chain([1, 2, 3], torch.full((3, 20), 0.05)),
    "laws without a table": lambda: chain([1, 2, 3], UNIFORM[:, 0]),
    "laws of laws": lambda: chain([1, 2, 3], UNIFORM[:, :, None].expand(-1, -1, 2)),
    "siblings alike": lambda: Draft((1, 1), (-1, -1)),
    "a child before its parent": lambda: Draft((1, 2), (1, -1)),
    "too few laws": lambda: chain([1, 2, 3, 4], UNIFORM),
    "more than 63 nodes": lambda: chain([1] * 64),
    "no draft at all": lambda: None,
    "words": lambda: chain(["1"]),
    "a chance that is no number": lambda: chain([1], chances=(math.nan,)),
    "a chance beyond 1": lambda: chain([1], chances=(1e308,)),
    "a chance in words": lambda: chain([1], chances=("likely",)),
}


@pytest.mark.parametrize("name", BAD_DRAFTS)
def test_a_bad_draft_costs_a_draft_and_is_logged(name, caplog):
    found = engine(MODEL, Scripted(lambda _request, _limit: BAD_DRAFTS[name]()))
    requests = [found.add([3, 1], params)[0] for params in (GREEDY, SEEDED)]
    drain(found)
    assert [tuple(r.output) for r in requests] == [TEXT[GREEDY], TEXT[SEEDED]]
    assert found.num_failed_drafts == 11  # each step but the last, where there is no room for a draft
    assert "the drafter failed" in caplog.text


def test_a_branching_draft_under_block_is_not_drafted():
    trees = random_trees(16)
    trees.trees = False  # or so it says
    found = engine(MODEL, trees, rule="block", k=6)
    (request,) = found.add([3, 1], SamplingParams(max_tokens=12))
    drain(found)
    assert request.num_output == 12 and found.num_failed_drafts > 0
    with pytest.raises(OptionError, match="'block' is for chains"):
        engine(MODEL, random_trees(16), rule="block")


@pytest.mark.parametrize("also", [{"observe"}, {"release"}, {"observe", "release"}], ids=["observe", "release", "both"])
def test_a_drafter_that_fails_anywhere_fails_no_request(also):
    found = engine(MODEL, Faulty(foresight(MODEL), also))
    requests = [found.add([3, 1], params)[0] for params in (GREEDY, SEEDED)]
    events = drain(found)
    assert [tuple(r.output) for r in requests] == [TEXT[GREEDY], TEXT[SEEDED]]
    assert sum(event.finish is not None for event in events) == 2


def test_an_interrupt_in_the_drafter_is_no_failure_of_the_drafter():
    class Interrupted(Drafter):
        def propose(self, requests: Any, limits: Any) -> Any:
            raise KeyboardInterrupt

    found = engine(MODEL, Interrupted())
    found.add([3, 1], GREEDY)
    with pytest.raises(KeyboardInterrupt):
        found.step()


def test_limits_are_never_above_the_room_left():
    seen: list[int] = []

    def script(request: Any, limit: int) -> Draft:
        seen.append(request.room - limit)
        return chain([0] * limit)

    run(engine(MODEL, Scripted(script), k=8), [3, 1], GREEDY)
    assert min(seen) == 1  # the pass itself adds one token
    for k, max_tokens in ((0, 12), (5, 1)):
        asked: list[int] = []
        drafter = Scripted(lambda _request, limit, asked=asked: asked.append(limit))
        run(engine(MODEL, drafter, k=k), [3, 1], SamplingParams(temperature=0, max_tokens=max_tokens))
        assert asked == []


# -- the model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params", [GREEDY, SEEDED, SamplingParams(max_tokens=12), SamplingParams(temperature=0, logprobs=2)]
)
def test_nan_fails_only_the_request_that_met_it(params):
    model = TableModel(16, order=2, num_phases=3, poison={7})
    found = engine(model, guesser(7))
    (broken,) = found.add([3, 7], params)
    (sound,) = found.add([3, 1], SamplingParams(temperature=0, max_tokens=12, logit_bias={7: -math.inf}))
    drain(found)
    assert (broken.finish, broken.output) == ("error", [])
    assert "NaN" in broken.error
    assert (sound.finish, sound.num_output) == ("length", 12)


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 4}, {}, {"temperature": 0, "presence_penalty": 0.1}])
def test_nan_behind_a_rejected_guess_is_nobody_s_problem(params, logprobs):
    """The target never says 7, so what it would say after it cannot matter, whoever guesses it."""
    poisoned = TableModel(16, order=2, num_phases=3, poison={7})
    params = SamplingParams(**params, max_tokens=12, logit_bias={7: -math.inf}, logprobs=logprobs)
    plain = oracle(MODEL.logits_of, [3, 1], params)
    for drafter in (Scripted(lambda _, limit: chain([7, 3, 4][:limit])), random_trees(16)):
        found = engine(poisoned, drafter, k=9)
        (request,) = found.add([3, 1], params)
        drain(found)
        assert (request.finish, request.num_output) == ("length", 12)
        assert request.stats.report()["num_draft_tokens"] > 0
        if params.greedy or params.seed:
            assert tuple(request.output) == plain


@pytest.mark.parametrize("greedy", [True, False])
def test_nan_that_the_text_itself_meets_fails_it_where_plain_decoding_fails(greedy):
    params = SamplingParams(temperature=0) if greedy else SamplingParams(seed=4)
    whole = oracle(MODEL.logits_of, [3, 1], params)
    token = whole[6]
    poisoned = TableModel(16, order=2, num_phases=3, poison={token})
    for drafter in (None, foresight(MODEL), guesser(16)):
        (request,) = (found := engine(poisoned, drafter, k=8)).add([3, 1], params)
        drain(found)
        assert request.finish == "error"
        assert tuple(request.output) == whole[: whole.index(token) + 1]


class Breaking(TableModel):
    """Raises in the passes whose numbers are named."""

    def __init__(self, *breaks: int, error: type[BaseException] = RuntimeError):
        super().__init__(16, order=2, num_phases=3)
        self.breaks, self.error = breaks, error

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if self.num_passes in self.breaks:
            raise self.error
        return output


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_pass_that_failed_can_be_repeated(error):
    """Nothing was committed, so the next step does the same again; drafts that were lost do not matter."""
    model = Breaking(1, 3, 4, 6, error=error)
    found = engine(model, foresight(model), k=2, max_num_batched_tokens=5, max_num_seqs=2)
    requests = [found.add([3, 1], params)[0] for params in (GREEDY, SEEDED)]
    failures = 0
    while found.has_work:
        try:
            found.step()
        except error:
            failures += 1
        found.scheduler.check()
    assert failures == 4
    assert [tuple(r.output) for r in requests] == [TEXT[GREEDY], TEXT[SEEDED]]
    assert found.cache.pool.num_held == 0


# -- requests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "options", "error", "says"),
    [
        ([], GREEDY, {}, PromptError, "the prompt is empty"),
        ([1] * 256, GREEDY, {}, PromptError, "256 tokens and the context 256"),
        ([1] * 20, GREEDY, {"max_model_len": 20}, PromptError, "20 tokens and the context 20"),
        ([1, 16], GREEDY, {}, PromptError, "prompt token 16 is not an id from 0 to 15"),
        ([-1], GREEDY, {}, PromptError, "prompt token -1"),
        ([True], GREEDY, {}, PromptError, "prompt token True"),
        ([1.0], GREEDY, {}, PromptError, "prompt token 1.0"),
        (["1"], GREEDY, {}, PromptError, "prompt token '1'"),
        ([1], SamplingParams(stop="x"), {}, OptionError, "stop strings need a tokenizer"),
        ([1], SamplingParams(stop_token_ids=[16]), {}, OptionError, "stop_token_ids names token 16"),
        ([1], SamplingParams(logit_bias={16: 1.0}), {}, OptionError, "logit_bias names token 16"),
        ([1] * 9, SamplingParams(max_tokens=8), {"num_pages": 4}, CapacityError, "need 17 rows, and the page"),
    ],
)  # fmt: skip
def test_requests_that_cannot_be_served_are_refused(prompt, params, options, error, says):
    found = engine(MODEL, **options)
    with pytest.raises(error, match=says):
        found.add(prompt, params)
    assert not found.has_work and found.cache.pool.num_held == 0


def test_references_are_checked_like_prompts():
    """One bad id would cost every draft of every step."""
    with pytest.raises(PromptError, match="reference token 99"):
        engine(MODEL).add([1], GREEDY, reference=[1, 99])


def test_the_largest_request_that_fits_is_served():
    found = engine(MODEL, foresight(MODEL), num_pages=4)
    assert len(run(found, [1] * 9, SamplingParams(max_tokens=7))) == 7


def test_aborting_is_final_and_may_be_repeated():
    found = engine(MODEL, foresight(MODEL), k=2)
    (running, waiting) = (found.add([3, 1], GREEDY)[0] for _ in range(2))
    found.step()
    for _ in range(2):
        for request in (running, waiting):
            assert found.abort(request).finish == "abort"
    assert not found.has_work and found.step() == []
    (done,) = found.add([3, 1], GREEDY)
    drain(found)
    assert found.abort(done).finish == "length"


def test_events_add_up():
    """Every token is reported once, drafted ones first, and the last event of a request says how it ended."""
    found = engine(MODEL, sampled_chain(MODEL.law), k=4, max_num_batched_tokens=9, max_num_seqs=4)
    requests = [found.add([i] * (3 + i), SamplingParams(max_tokens=9, ignore_eos=True))[0] for i in range(5)]
    events = drain(found)
    for request in requests:
        own = [event for event in events if event.request is request]
        assert [token for event in own for token in event.tokens] == request.output
        assert [event.finish for event in own] == [None] * (len(own) - 1) + ["length"]
        assert all(event.num_accepted <= min(event.num_drafted, len(event.tokens)) for event in own)
        report = request.stats.report()
        assert report["num_accepted_draft_tokens"] == sum(event.num_accepted for event in own)
        assert report["num_draft_tokens"] == sum(event.num_drafted for event in own)


# -- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be above 0, not 0"),
        ({"max_model_len": -5}, "max_model_len must be above 0, not -5"),
        ({"kv_cache_memory": 0.0}, "kv_cache_memory must be above 0"),
        ({"kv_cache_memory": "2"}, "kv_cache_memory must be a number, not '2'"),
        ({"max_num_seqs": 2.5}, "max_num_seqs must be a whole number, not 2.5"),
        ({"block_size": True}, "block_size must be a whole number, not True"),
        ({"max_num_seqs": None}, "max_num_seqs must be a whole number, not None"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching must be True or False, not 1"),
        ({"max_num_batched_tokens": 7, "max_num_seqs": 8}, r"\(7\) must be at least max_num_seqs \(8\)"),
    ],
)  # fmt: skip
def test_options_out_of_range(options, says):
    with pytest.raises(OptionError, match=says):
        EngineOptions(**options)


def test_the_pool_s_size():
    info = MODEL.info  # two layers of 8-byte keys and values, 1 + 1 and 1 + 2 wide
    assert bytes_per_token(info) == 5 * 8
    assert size_pool(info, EngineOptions(num_pages=3), 100) == 3
    assert size_pool(info, EngineOptions(max_num_seqs=2, block_size=4), 100) == 2 * 164 // 4
    assert size_pool(info, EngineOptions(kv_cache_memory=400 / 2**30, block_size=2), 100) == 5
    assert size_pool(info, EngineOptions(kv_cache_memory=1 / 2**30), 100) == 1


def test_the_context_is_the_model_s_or_less():
    assert engine(MODEL).max_length == 256
    assert engine(MODEL, max_model_len=50).max_length == 50


def test_defaults_work_without_a_word():
    found = Engine(MODEL, lambda _setting: foresight(MODEL))
    assert run(found, [3, 1], GREEDY) == TEXT[GREEDY]

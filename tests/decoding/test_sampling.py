"""Warping against a slow, plain reading of the documented order; rows that do not feel their neighbours; bad values."""

import math
from fractions import Fraction

import pytest
import torch

from pilotfish.decoding import sampling
from pilotfish.decoding.sampling import PARAM_NAMES, SamplingParams, process, warp
from pilotfish.errors import OptionError

PROMPT, STOP_IDS = (1, 2, 2), frozenset({0, 3})
OUTPUTS = [(), (4,), (4, 4, 2), (5, 1, 4, 4, 4)]
VOCAB = 7


def some_logits(num_rows=4, vocab=VOCAB, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab, generator=generator, dtype=torch.float64) * scale


# The reference: one row, lists of floats, a step after the other.


def reference_process(logits, params, prompt, output, stop_ids):
    logits = list(logits)
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in params.begin_suppress_tokens:
        logits[token] = logits[token] if output else -math.inf
    if len(output) < params.min_tokens:
        for token in stop_ids:
            logits[token] = -math.inf
    for token in range(len(logits)):
        if token in prompt or token in output:
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        if token in output:
            logits[token] -= params.presence_penalty
            logits[token] -= params.frequency_penalty * output.count(token)
    return logits


def softmax(logits):
    weights = [math.exp(x - max(logits)) if x > -math.inf else 0.0 for x in logits]
    return [weight / sum(weights) for weight in weights]


def reference_warp(logits, params, prompt=(), output=(), stop_ids=frozenset()):
    logits = reference_process(logits, params, prompt, output, stop_ids)
    p = softmax([x / params.temperature for x in logits])
    p = [x if x >= params.min_p * max(p) * (1 - 1e-12) else 0.0 for x in p]
    if params.top_k > 0:
        edge = sorted(p, reverse=True)[: params.top_k][-1]
        p = [x if x >= edge else 0.0 for x in p]
    p = [x / sum(p) for x in p]
    if params.top_p < 1:
        kept, mass = set(), 0.0
        for token in sorted(range(len(p)), key=lambda token: (-p[token], token)):
            if mass >= params.top_p:
                break
            kept.add(token)
            mass += p[token]
        p = [x if token in kept else 0.0 for token, x in enumerate(p)]
    return [x / sum(p) for x in p]


SETTINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": -1},
    {"top_k": 100},
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7},
    {"logit_bias": {2: 4.0, 5: -3.0}},
    {"logit_bias": {0: -math.inf}},
    {"begin_suppress_tokens": [2, 5]},
    {"begin_suppress_tokens": [2], "logit_bias": {2: 4.0}, "min_tokens": 2, "repetition_penalty": 1.2},
    {"min_tokens": 1},
    {"min_tokens": 3},
    {"temperature": 0.7, "top_k": 4, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.4,
     "frequency_penalty": 0.3, "logit_bias": {4: 2.0}, "min_tokens": 2, "min_p": 0.01},
]  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_warp_is_what_the_documented_order_says(setting, seed):
    params, logits_NV = SamplingParams(**setting), some_logits(seed=seed)
    p_NV = warp(logits_NV, params, PROMPT, OUTPUTS, STOP_IDS)
    for logits_V, output, p_V in zip(logits_NV.tolist(), OUTPUTS, p_NV, strict=True):
        expected_V = torch.tensor(reference_warp(logits_V, params, PROMPT, output, STOP_IDS), dtype=torch.float64)
        assert torch.equal(p_V > 0, expected_V > 0)
        assert torch.allclose(p_V, expected_V, atol=1e-12, rtol=0)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_process_is_all_that_greedy_decoding_needs(setting):
    params = SamplingParams(**(setting | {"temperature": 0}))
    logits_NV = some_logits(seed=4)
    processed_NV = process(logits_NV, params, PROMPT, OUTPUTS, STOP_IDS)
    for logits_V, output, processed_V in zip(logits_NV.tolist(), OUTPUTS, processed_NV.tolist(), strict=True):
        assert processed_V == pytest.approx(reference_process(logits_V, params, PROMPT, output, STOP_IDS), abs=1e-12)


def test_ties_at_the_edge_of_top_k_are_all_kept():
    p_NV = warp(torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]]), SamplingParams(top_k=2))
    assert (p_NV > 0).tolist() == [[False, True, True, True, True, False]]


@pytest.mark.parametrize(("top_p", "num_kept"), [(0.2, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4)])
def test_ties_in_top_p_go_by_token_id_and_the_edge_belongs_to_the_inside(top_p, num_kept):
    """Four tokens of exactly a quarter: the smallest set whose mass *reaches* top_p."""
    p_NV = warp(torch.zeros(1, 4), SamplingParams(top_p=top_p))
    assert (p_NV > 0).tolist() == [[token < num_kept for token in range(4)]]


def test_min_p_keeps_the_edge():
    p_NV = warp(torch.tensor([[0.0, math.log(0.5), math.log(0.25)]], dtype=torch.float64), SamplingParams(min_p=0.5))
    assert (p_NV > 0).tolist() == [[True, True, False]]


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("vocab", [2, 17, 3000])
def test_sorting_only_candidates_finds_the_nucleus_of_a_full_sort(vocab, scale, top_p):
    """From flat laws (every token is a candidate) to peaky ones (hardly any is)."""
    for seed in range(4):
        logits_NV = some_logits(2, vocab, seed, scale)
        p_NV = warp(logits_NV, SamplingParams(top_p=top_p))
        for full_V, p_V in zip(torch.softmax(logits_NV, 1), p_NV, strict=True):
            sorted_p, order = full_V.sort(descending=True, stable=True)
            inside = order[sorted_p.cumsum(0) - sorted_p < top_p]
            # Sums in another order may disagree on a token that sits on the edge to the last bit; none here does.
            assert sorted(inside.tolist()) == torch.nonzero(p_V).squeeze(1).tolist()
            assert torch.allclose(p_V[inside], full_V[inside] / full_V[inside].sum(), atol=1e-12, rtol=1e-9)


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p():
    for seed in range(20):
        logits_NV = some_logits(1, 200, seed, 3.0)
        p_V, full_V = warp(logits_NV, SamplingParams(top_p=0.9))[0], torch.softmax(logits_NV, 1)[0]
        inside = p_V > 0
        assert full_V[inside].sum() >= 0.9
        assert full_V[inside].sum() - full_V[inside].min() < 0.9
        assert full_V[~inside].max() <= full_V[inside].min()


# Rows.


@pytest.mark.parametrize("vocab", [1, 300, 5_000, 50_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_does_not_feel_its_neighbours(vocab, dtype):
    """Bit for bit: the same alone, in a batch of any size and at any place in it. Otherwise a draft would be heard."""
    logits_NV = some_logits(9, vocab, seed=1, scale=4.0).to(dtype)
    outputs = [tuple(range(row % 5)) for row in range(9)]
    for params in (
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.001),
        SamplingParams(top_p=0.95, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.1, min_tokens=2),
    ):
        p_NV = warp(logits_NV, params, (0,), outputs, {0} if vocab > 1 else frozenset())
        for rows in ([0], [3], [8], [2, 3], [8, 0, 5], list(range(1, 9))):
            alone = warp(logits_NV[rows], params, (0,), [outputs[row] for row in rows], {0} if vocab > 1 else set())
            assert torch.equal(alone, p_NV[rows])


def test_penalties_see_the_prefix_of_their_own_row():
    """A draft (4, 5): the second row's token 4 is penalised, the first's is not."""
    params = SamplingParams(presence_penalty=2.0)
    logits_NV = torch.zeros(3, 6)
    processed_NV = process(logits_NV, params, (), [(), (4,), (4, 5)], frozenset())
    assert processed_NV.tolist() == [[0] * 6, [0, 0, 0, 0, -2, 0], [0, 0, 0, 0, -2, -2]]


def test_min_tokens_sees_the_length_of_its_own_row():
    processed_NV = process(torch.zeros(3, 3), SamplingParams(min_tokens=2), (), [(), (1,), (1, 1)], {2})
    assert torch.isinf(processed_NV).tolist() == [[False, False, True], [False, False, True], [False] * 3]


def test_what_cannot_be_first_may_come_second():
    """Each row by its own text: in a draft's rows, all but the pending one have something before them."""
    processed_NV = process(torch.zeros(3, 3), SamplingParams(begin_suppress_tokens=[0, 1]), (5,), [(), (2,), (2, 2)])
    assert torch.isinf(processed_NV).tolist() == [[True, True, False], [False] * 3, [False] * 3]


def test_ids_beyond_a_smaller_vocabulary_are_ignored():
    """A draft head may know fewer ids than the target; what it cannot say needs no penalty."""
    params = SamplingParams(
        logit_bias={2: 1.0, 99: 5.0}, min_tokens=5, repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=1.0,
        begin_suppress_tokens=[95],
    )  # fmt: skip
    processed_NV = process(torch.ones(1, 3), params, (98, 0), [(97, 1)], {96, 2})
    assert processed_NV.tolist() == [[0.5, -1.5, -math.inf]]


def test_the_input_is_left_alone():
    logits_NV = some_logits()
    before = logits_NV.clone()
    for setting in SETTINGS:
        warp(logits_NV, SamplingParams(**setting), PROMPT, OUTPUTS, STOP_IDS)
        process(logits_NV, SamplingParams(**setting), PROMPT, OUTPUTS, STOP_IDS)
    assert torch.equal(logits_NV, before)


def test_float_types():
    params = SamplingParams(temperature=0.9, top_p=0.8, top_k=5)
    logits_NV = some_logits(2, 50)
    assert warp(logits_NV, params).dtype == torch.float64
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        p_NV = warp(logits_NV.to(dtype), params)
        assert p_NV.dtype == torch.float32
        # The lower type's rounding ends at the logits: from there on it is float32.
        assert torch.equal(p_NV, warp(logits_NV.to(dtype).float(), params))
        assert process(logits_NV.to(dtype), params).dtype == torch.float32


def test_laws_sum_to_1_even_of_extreme_logits():
    logits_NV = torch.tensor([[1e4, -1e4, 0.0], [3e38, 1.0, 0.0], [-3e38, -3e38, -3e38], [-math.inf, 0.0, -math.inf]])
    for params in (SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(temperature=1e-8, top_k=2, min_p=0.1)):
        p_NV = warp(logits_NV[[0, 3]] if params.temperature < 1 else logits_NV, params)
        assert torch.allclose(p_NV.sum(1), torch.ones(len(p_NV)))
        assert p_NV[0].tolist() == [1, 0, 0]
        assert p_NV[-1].tolist() == [0, 1, 0]


def test_a_low_temperature_tends_to_the_argmax():
    logits_NV = some_logits(4, 50).float()
    p_NV = warp(logits_NV, SamplingParams(temperature=1e-6))
    assert torch.equal(p_NV.argmax(1), logits_NV.argmax(1))
    assert p_NV.amax(1).tolist() == [1.0] * 4


def test_greedy_has_no_law():
    with pytest.raises(AssertionError, match="greedy"):
        warp(torch.zeros(1, 3), SamplingParams(temperature=0))


# Parameters.


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "temperature": [-0.1, -1e-9, math.nan, math.inf, "1", None, True, 1j],
        "top_p": [0, 0.0, -0.5, 1.0000001, 2, math.nan, math.inf, "0.9", None, True],
        "top_k": [-2, 1.5, 2.0, math.nan, "40", None, True],
        "min_p": [-0.01, 1.01, math.nan, "0", None, False],
        "repetition_penalty": [0, -1, math.nan, math.inf, "1.1", None, True],
        "presence_penalty": [-2.01, 2.01, math.nan, "0", None, False],
        "frequency_penalty": [-2.01, 2.01, -math.inf, "0", None, False],
        "logit_bias": [{1: math.nan}, {1: math.inf}, {1: "2"}, {1: None}, {"1": 2.0}, {1.5: 2.0}, {True: 1.0},
                       {-1: 2.0}, [1, 2], "1"],
        "max_tokens": [0, -1, 2.0, math.inf, "16", None, True],
        "min_tokens": [-1, 257, 1.0, "1", None, True],
        "stop": ["", ("a", ""), ("a", 1), [None], 5],
        "stop_token_ids": [("1",), "12", (1.0,), (True,), (None,), (-1,), 5],
        "begin_suppress_tokens": [("1",), (1.0,), (True,), (-1,), 5],
        "include_stop_str_in_output": [1, "yes", None],
        "ignore_eos": [0, "false", None],
        "seed": [1.0, "1", True],
        "logprobs": [-1, 1.0, "2", True],
        "logprobs_mode": ["raw", "raw_logits", None, 1, []],
        "n": [0, -1, 1.0, "2", None, True],
    }.items(),
)  # fmt: skip
def test_a_bad_value_is_an_option_error_that_names_the_parameter(name, values):
    for value in values:
        with pytest.raises(OptionError, match=name):
            SamplingParams(**{name: value})


def test_the_message_names_the_value_and_the_way_out():
    with pytest.raises(OptionError, match=r"temperature must be 0 \(greedy\) or more, not -1"):
        SamplingParams(temperature=-1)
    with pytest.raises(OptionError, match=r"top_p must be in \(0, 1\], not 0"):
        SamplingParams(top_p=0)
    with pytest.raises(OptionError, match="min_tokens must be in .*, not 9"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_good_values_at_the_edge():
    SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=1, presence_penalty=-2, frequency_penalty=2, max_tokens=1)
    SamplingParams(min_tokens=256, logprobs=0, seed=-(2**70), n=3, logit_bias={0: -math.inf, 5: -100}, stop=[])
    assert SamplingParams(top_p=Fraction(1, 2) + 0.0).top_p == 0.5


def test_unknown_and_positional_parameters_are_refused():
    with pytest.raises(TypeError, match="tempereture"):
        SamplingParams(tempereture=1)
    with pytest.raises(TypeError):
        SamplingParams(0.5)


def test_stop_is_normalised_to_a_tuple():
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c")
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)
    assert SamplingParams(begin_suppress_tokens=[1]).begin_suppress_tokens == (1,)
    assert SamplingParams() == SamplingParams(stop=[], stop_token_ids=[])


def test_what_is_processed_and_penalised():
    assert not SamplingParams(temperature=0.5, top_k=3, top_p=0.5, min_p=0.5).processed
    for setting in ({"logit_bias": {1: 1.0}}, {"min_tokens": 1}):
        assert SamplingParams(**setting).processed
        assert not SamplingParams(**setting).penalised
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{name: 1.5}).processed
        assert SamplingParams(**{name: 1.5}).penalised
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-9).greedy
    assert "top_p" in PARAM_NAMES


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_temperatures_beyond_the_float_type(dtype):
    """They round to 0 or infinity there; the law is that of the nearest temperature it has."""
    logits_NV = torch.tensor([[1.0, 3.0, 2.0, -math.inf]], dtype=dtype)
    for temperature in (1e-46, 1e-320):
        assert warp(logits_NV, SamplingParams(temperature=temperature)).tolist() == [[0, 1, 0, 0]]
    for temperature in (1e39, 1e300):
        law_V = warp(logits_NV, SamplingParams(temperature=temperature))[0]
        torch.testing.assert_close(law_V, torch.tensor([1 / 3, 1 / 3, 1 / 3, 0], dtype=dtype))


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "max_tokens", "n", "frequency_penalty"])
def test_numbers_that_no_float_holds_are_refused_shortly(name: str) -> None:
    with pytest.raises(OptionError, match=name) as caught:
        SamplingParams(**{name: 10**400})
    assert len(str(caught.value)) < 200
    for bias in (10**400, -(10**400), 1e39, math.nan):
        with pytest.raises(OptionError, match="logit_bias"):
            SamplingParams(logit_bias={1: bias})
    assert SamplingParams(logit_bias={1: -math.inf}).logit_bias == {1: -math.inf}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [5, 200, 20_000])
def test_both_ways_to_the_laws_give_the_same_bits(vocab: int, dtype: torch.dtype) -> None:
    """On a CPU and elsewhere; `_laws` runs anywhere."""
    generator = torch.Generator().manual_seed(vocab)
    cases = [{"top_p": 0.9}, {"top_p": 0.5, "temperature": 0.7}, {"top_k": 3, "temperature": 1.3},
             {"min_p": 0.1, "top_p": 0.99}, {"temperature": 1e-30}, {"top_k": vocab}]  # fmt: skip
    seen = set()
    for scale in (0.0, 0.5, 3.0, 20.0):
        logits_NV = torch.randn(2, vocab, generator=generator, dtype=dtype) * scale
        logits_NV[1] = logits_NV[1].round()  # ties
        for case in cases:
            params = SamplingParams(**case)
            p_NV = sampling._laws_on_cpu(logits_NV, params)
            assert torch.equal(p_NV, sampling._laws(logits_NV, params)), (scale, case)
            seen.add(int((p_NV == 0).sum()))
    assert len(seen) > 5

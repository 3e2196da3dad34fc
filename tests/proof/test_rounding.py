"""Near-ties and faults: a model whose logits move with the shape of a pass, by a little or by too much."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from pilotfish.bench.divergence import margin
from pilotfish.decoding.sampling import SamplingParams
from pilotfish.models.base import ModelOutput
from pilotfish.models.huggingface import HuggingFaceLM
from pilotfish.proof.identity import compare, draft_with_itself, draft_with_itself_unseeded, same_in_any_shape
from pilotfish.proof.rounding import divergence, row_in_shapes
from tests import adversaries
from tests.fakes import TableModel
from tests.models.tiny import tiny_model

TIE = 1e-5  # how far ahead token 0 is of token 1, everywhere


class Wobbly(TableModel):
    """Says 0 or 1, which are nearly tied; in a pass of more than two rows token 1 gains ``wobble``."""

    def __init__(self, wobble: float, dtype: torch.dtype = torch.float32, bitwise: bool = False):
        super().__init__(12, num_phases=3)
        self.table[..., :2] = 9.0
        self.table[..., 0] += TIE
        self.wobble = wobble
        self.info = replace(self.info, dtype=dtype, bitwise=bitwise)

    def forward(self, batch, cache, *, taps: Sequence[int] = (), layers=None) -> ModelOutput:
        output = super().forward(batch, cache, taps=taps, layers=layers)
        output.logits_NV[:, 1] += self.wobble * (batch.num_rows > 2)
        return output


def _draft(_setting):
    return adversaries.guesser(2)


def test_a_near_tie_is_counted_and_passes(ground):
    outcome = compare(ground(Wobbly(3 * TIE), build=_draft), 0.0)
    assert outcome.check.passed
    assert outcome.num_near_ties == 4  # two prompts, in a batch and alone
    assert "near-tie at position 11: token 0 or 1, margin 1e-05, rounding 3e-05" in outcome.check.detail


def test_a_seeded_margin_is_one_in_the_race():
    model, prefix = Wobbly(2e-4), [1, 2, 3]
    params = SamplingParams(seed=4)
    found = divergence(model, prefix, 2, [0], [1], 5, params=params, seed=4)
    assert found.margin == pytest.approx(abs(margin(model, prefix, 0, 1, params)), abs=2.1e-4)
    assert 1e-4 < found.rounding < 2e-4, "log p moves by less than the logit"
    assert not found.near_tie
    model.table[..., 0] -= margin(model, prefix, 0, 1, params) - 1e-5
    assert divergence(model, prefix, 2, [0], [1], 5, params=params, seed=4).near_tie


@pytest.mark.parametrize(
    "model", [Wobbly(3 * TIE, torch.float64), Wobbly(3 * TIE, bitwise=True)], ids=["float64", "bitwise"]
)
def test_exact_models_have_no_near_ties(ground, model):
    outcome = compare(ground(model, build=_draft), 0.0)
    assert not outcome.check.passed
    assert outcome.check.statistic == 4
    assert outcome.num_near_ties == 0
    assert "fault at position 11" in outcome.check.detail
    assert not same_in_any_shape(ground(model)).passed


def test_what_cannot_be_rounding_is_no_excuse(ground):
    model = Wobbly(0.5)  # as when activations are quantised with a scale that all rows share
    model.table[..., 1] -= 0.2
    outcome = compare(ground(model, build=_draft), 0.0)
    assert not outcome.check.passed
    assert outcome.num_near_ties == 0
    shape = same_in_any_shape(ground(model))
    assert not shape.passed
    assert shape.statistic == pytest.approx(0.5)
    assert not draft_with_itself(ground(model), 0.0).check.passed


def test_the_target_as_its_own_draft_may_be_refused_by_rounding_only(ground):
    small = draft_with_itself(ground(Wobbly(3 * TIE)), 0.0)
    assert small.check.passed
    assert small.num_near_ties > 0
    assert draft_with_itself_unseeded(ground(Wobbly(3 * TIE))).check.passed
    exact = draft_with_itself(ground(Wobbly(0.0)), 0.0)
    assert exact.check.passed
    assert exact.divergences == ()


def test_a_text_that_just_ends_is_a_fault(table):
    found = divergence(table, [1, 2, 3], 2, [4], [], 5, params=SamplingParams(temperature=0), seed=0)
    assert not found.near_tie
    assert found.margin == float("inf")


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 20])
@pytest.mark.parametrize("num_prompt", [1, 3])
def test_all_shapes_give_the_same_row_of_a_real_model(length, num_prompt):
    model = HuggingFaceLM(tiny_model())
    text = [(5 * i + 1) % 64 for i in range(length)]
    rows = row_in_shapes(model, text, min(num_prompt, length), [7, 8, 9, 10], 3)
    expected_V = model.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
    assert len(rows) == 3
    for row_V in rows:
        torch.testing.assert_close(row_V, expected_V)


def test_a_draft_is_cut_at_the_context(table):
    model = TableModel(12, context=8)
    assert len(row_in_shapes(model, [1] * 7, 2, [1, 2, 3, 4], 4)) == 3
    assert len(row_in_shapes(model, [1] * 8, 2, [1, 2, 3, 4], 4)) == 3


def test_a_model_that_breaks_down_is_reported(ground):
    model = TableModel(12, num_phases=3, poison=set(range(12)))
    outcome = compare(ground(model), 0.0)
    assert not outcome.check.passed
    assert "NaN" in outcome.check.detail

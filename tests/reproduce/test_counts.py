"""Drafts from counts: their laws, and that what they draft is exact."""

import pytest
import torch

from pilotfish.decoding.request import Request
from pilotfish.decoding.sampling import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.reproduce.counts import CountDrafter, Counts
from tests.fakes import TableModel

TEXTS = [[0, 1, 2, 1], [1, 2, 2]]


def test_unigrams_and_bigrams_by_hand() -> None:
    counts = Counts(TEXTS, 4)
    assert counts.unigram_V.tolist() == pytest.approx([1 / 7, 3 / 7, 3 / 7, 0])
    # After 2 came 1 and 2 once each; one part in three is the unigram's.
    assert counts.bigram(2).tolist() == pytest.approx([1 / 21, (1 + 3 / 7) / 3, (1 + 3 / 7) / 3, 0])
    assert counts.bigram(3).tolist() == pytest.approx(counts.unigram_V.tolist())  # never seen
    assert all(float(counts.bigram(token).sum()) == pytest.approx(1) for token in range(4))


def test_texts_are_not_joined() -> None:
    assert 1 not in Counts(TEXTS, 4).after[1]  # the end of one, the beginning of the other


@pytest.mark.parametrize("order", [1, 2])
def test_drafts_carry_the_law_they_were_drawn_from(order: int) -> None:
    counts = Counts(TEXTS, 4)
    request = Request("r", (0, 2), SamplingParams(), 5, "rejection", 99)
    (draft,) = CountDrafter(counts, order).propose([request], [3])
    assert draft.probs is not None
    assert len(draft) == 3
    befores = [2, *draft.tokens[:2]]
    for before, q_V in zip(befores, draft.probs, strict=True):
        law_V = counts.unigram_V if order == 1 else counts.bigram(before)
        assert torch.allclose(q_V.double(), law_V, atol=1e-6)


@pytest.mark.parametrize("order", [1, 2])
def test_greedy_drafts_are_the_likeliest_tokens(order: int) -> None:
    request = Request("r", (0,), SamplingParams(temperature=0), 5, "rejection", 99)
    (draft,) = CountDrafter(Counts(TEXTS, 4), order).propose([request], [2])
    assert draft.tokens == ((1, 1) if order == 1 else (1, 2))
    assert draft.probs is None


def test_text_is_the_same_with_such_drafts() -> None:
    target = TableModel(4, order=1, seed=3)
    outputs = []
    for num_drafted in (0, 4):
        engine = Engine(target, lambda _s: CountDrafter(Counts(TEXTS, 4), 2), num_speculative_tokens=num_drafted)
        (request,) = engine.add([1], SamplingParams(seed=11, max_tokens=40))
        while not request.finish:
            engine.step()
        assert engine.num_failed_drafts == 0
        outputs.append(request.output)
    assert outputs[0] == outputs[1]

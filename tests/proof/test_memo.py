"""A memo has the laws of its model, whatever the engine does with its rows, and asks for no path twice."""

import pytest
import torch

from pilotfish.decoding.sampling import SamplingParams
from pilotfish.drafters.layer_skip import LayerSkipDrafter
from pilotfish.drafters.none import NoDrafter
from pilotfish.engine.options import EngineOptions
from pilotfish.models.huggingface import HuggingFaceLM
from pilotfish.paged.batch import Feed, lay_out
from pilotfish.proof.memo import MemoLM
from tests import adversaries, fakes
from tests.models.tiny import tiny_model

PROMPT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]


def _texts(model, drafter=None, **options):
    """Outputs of a small batch, seeded and greedy, with too few pages, so that requests are preempted."""
    engine = fakes.engine(model, drafter, num_pages=16, max_num_seqs=4, **options)
    params = [SamplingParams(temperature=0, max_tokens=20), *(SamplingParams(seed=s, max_tokens=20) for s in range(4))]
    requests = [request for own in params for request in engine.add(PROMPT, own)]
    fakes.drain(engine)
    return [request.output for request in requests], engine.scheduler.num_preemptions


@pytest.mark.parametrize("drafter", ["none", "trees", "right", "layer_skip"])
def test_texts_are_those_of_the_model(table, drafter):
    drafters = {
        "none": lambda _setting: NoDrafter(),
        "trees": lambda _setting: adversaries.random_trees(12),
        "right": lambda _setting: adversaries.foresight(table),
        "layer_skip": lambda setting: LayerSkipDrafter(setting.model, setting.cache, [0]),
    }
    expected, preemptions = _texts(table, drafters[drafter])
    memo = MemoLM(table)
    assert _texts(memo, drafters[drafter])[0] == expected
    assert preemptions > 0
    passes = memo.num_passes
    assert _texts(memo, drafters[drafter])[0] == expected
    assert memo.num_passes == passes, "a second run knows every path"


def test_a_drafter_that_uses_some_layers_drafts_the_same(table):
    drafts = []
    for model in (table, MemoLM(table)):
        engine = fakes.engine(model, lambda setting: LayerSkipDrafter(setting.model, setting.cache, [0]))
        (request,) = engine.add(PROMPT, SamplingParams(temperature=0, max_tokens=24))
        fakes.drain(engine)
        drafts.append((request.output, request.stats.per_step_drafted, request.stats.per_step_accepted))
    assert drafts[0] == drafts[1]
    assert 0 < sum(drafts[0][2]) < sum(drafts[0][1]), "the draft is neither always right nor always wrong"


def test_logits_are_those_of_a_real_model_and_states_too():
    model = HuggingFaceLM(tiny_model())
    memo = MemoLM(model)
    for path in (PROMPT, PROMPT[:4], [*PROMPT[:4], 9, 9]):  # a path, one inside it, one that leaves it
        cache = model.new_cache(4)
        cache.open("a", path)
        cache.reserve("a", len(path))
        expected = model.forward(lay_out([Feed("a", path, 0, 2)], cache), cache, taps=[1])
        names = memo.new_cache(4)
        names.open("a", path)
        names.reserve("a", len(path))
        found = memo.forward(lay_out([Feed("a", path, 0, 2)], names), names, taps=[1])
        torch.testing.assert_close(found.logits_NV, expected.logits_NV)
        torch.testing.assert_close(found.taps[1], expected.taps[1])
        torch.testing.assert_close(memo.logits(path), expected.logits_NV[-1])


def test_many_paths_take_few_passes(table):
    memo = MemoLM(table)
    memo.read([*PROMPT, 5, 6, 7], 3)
    assert memo.num_passes == 1
    memo.logits([*PROMPT, 5, 6])
    memo.logits([*PROMPT, 5])
    assert memo.num_passes == 1
    memo.logits(PROMPT)
    assert memo.num_passes == 2


def test_a_full_memo_forgets_rows_and_keeps_logits(table):
    memo = MemoLM(table, num_rows=12)
    paths = [[i, *PROMPT[:9]] for i in range(6)]
    rows = [memo.logits(path) for path in paths]
    for path, row_V in zip(paths, rows, strict=True):
        torch.testing.assert_close(row_V, table.logits_of(path))
        torch.testing.assert_close(memo.logits(path[:5]), table.logits_of(path[:5]))
    with pytest.raises(AssertionError, match="memo of 12 rows cannot hold a text of 13"):
        memo.logits([1] * 13)


def test_a_batch_larger_than_the_memo_is_run_in_parts(table):
    engine = fakes.engine(MemoLM(table, num_rows=16))
    requests = [engine.add([i, *PROMPT], SamplingParams(temperature=0, max_tokens=2))[0] for i in range(4)]
    fakes.drain(engine)
    for i, request in enumerate(requests):
        assert request.output[0] == int(table.logits_of([i, *PROMPT]).argmax())
    assert EngineOptions().max_num_seqs >= len(requests), "they were one batch"

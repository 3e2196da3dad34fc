"""Drafting with some of the target's layers, on the target's own pages; and `forward(layers=...)`, its footing."""

import copy
import math

import pytest
import torch

from pilotfish.decoding.sampling import SamplingParams
from pilotfish.drafters.layer_skip import LayerSkipDrafter, LayerSkipOptions, drafting_layers
from pilotfish.drafters.registry import parse
from pilotfish.errors import DraftError, ModelError, OptionError
from pilotfish.models.huggingface import HuggingFaceLM
from pilotfish.paged.batch import Feed, lay_out
from tests.fakes import TableModel, drain, engine, run
from tests.models.tiny import tiny_model

NUM_LAYERS = 5
KINDS = {"greedy": {"temperature": 0}, "seeded": {"seed": 7}, "sampled": {}}
PROMPTS = [[5, 6, 7, 8] * 3, [3, 1, 3, 1, 3], list(range(20))]


@pytest.fixture(scope="module")
def model():
    return HuggingFaceLM(tiny_model(num_hidden_layers=NUM_LAYERS), self_check=False)


# -- a forward of some layers -----------------------------------------------------------------------------------------


def layer_list(hf):
    return next(m for m in hf.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 4)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text", "gpt_neox"])
def test_some_layers_are_the_model_without_the_others(kind):
    """Compared with a copy whose other layers are really gone; what they keep in the cache is not touched."""
    alternating = ["sliding_attention", "full_attention"] * 2
    size = {"n_layer": 4} if kind == "gpt2" else {"num_hidden_layers": 4}
    hf = tiny_model(kind, **size, **({"layer_types": alternating} if kind == "gemma3_text" else {}))
    tokens, layers = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], (0, 2, 3)
    cut = copy.deepcopy(hf)
    kept = [layer for i, layer in enumerate(layer_list(cut)) if i in layers]
    del layer_list(cut)[3:]
    parts = next(m for m in cut.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 3)
    for place, layer in enumerate(kept):
        parts[place] = layer
    if kind == "gemma3_text":
        cut.config.layer_types = [alternating[layer] for layer in layers]
    with torch.inference_mode():
        wanted_NV = cut(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    model = HuggingFaceLM(hf, self_check=False)
    cache = model.new_cache(4, 4)
    cache.open("a", tokens)
    cache.reserve("a", len(tokens))
    for stored in (*cache.keys, *cache.values):
        stored.fill_(math.nan)
    found_NV = model.forward(lay_out([Feed("a", tokens, 0, len(tokens))], cache), cache, layers=layers).logits_NV
    torch.testing.assert_close(found_NV, wanted_NV)
    assert [bool(keys.isnan().all()) for keys in cache.keys] == [False, True, False, False]


def test_all_layers_by_number_are_all_layers(model):
    tokens, results = [3, 1, 4, 1, 5], []
    for layers in (None, range(NUM_LAYERS)):
        cache = model.new_cache(2, 4)
        cache.open("a", tokens)
        cache.reserve("a", len(tokens))
        results.append(model.forward(lay_out([Feed("a", tokens, 0, 5)], cache), cache, layers=layers).logits_NV)
    assert torch.equal(*results)


def test_a_layer_that_is_not_there_is_refused_and_the_model_stays_whole(model):
    cache = model.new_cache(2, 4)
    cache.open("a", [1, 2])
    cache.reserve("a", 2)
    batch = lay_out([Feed("a", [1, 2], 0, 2)], cache)
    before_NV = model.forward(batch, cache).logits_NV
    with pytest.raises(ModelError, match="layer 5 .* layers 0 to 4"):
        model.forward(batch, cache, layers=[0, 5])
    with pytest.raises(AttributeError):
        model.forward(None, cache, layers=[0])  # fails on the way
    assert torch.equal(model.forward(batch, cache).logits_NV, before_NV)


# -- which layers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_layers", "layers"),
    [(2, (0,)), (3, (0, 2)), (4, (0, 1, 3)), (5, (0, 1, 3, 4)), (11, (0, 1, 2, 3, 4, 7, 8, 9, 10))],
)
def test_auto_leaves_out_a_fifth_from_the_middle_on(num_layers, layers):
    assert drafting_layers(LayerSkipOptions(), num_layers) == layers


def test_layers_are_named_or_counted():
    assert drafting_layers(LayerSkipOptions(skip_layers=[1, 3]), 5) == (0, 2, 4)
    assert drafting_layers(LayerSkipOptions(skip_layers="1, 3"), 5) == (0, 2, 4)
    assert drafting_layers(LayerSkipOptions(exit_layer=2), 5) == (0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip_layers": [1, 9]}, "skip_layers names layer 9; the target has layers 0 to 4"),
        ({"skip_layers": [0, 1, 2, 3, 4]}, "skip_layers names all 5 layers"),
        ({"exit_layer": 5}, "exit_layer 5 leaves nothing out: the target has 5 layers; give 1 to 4"),
    ],
)
def test_layers_that_the_target_lacks_are_refused(model, options, message):
    with pytest.raises(DraftError, match=message):
        engine(model, parse({"method": "layer_skip", **options}).build)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip_layers": [1], "exit_layer": 2}, "exclude each other"),
        ({"exit_layer": 0}, "exit_layer must be a whole number from 1, not 0"),
        ({"skip_layers": "1,two"}, "skip_layers must name layers by numbers from 0, not 'two'"),
        ({"skip_layers": [-1]}, "not -1"),
        ({"skip_layers": []}, "skip_layers must be a list of layers or 'auto'"),
        ({"skip_layers": 3}, "skip_layers must be a list of layers or 'auto'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        parse({"method": "layer_skip", **options})


def test_a_single_layer_cannot_be_skipped():
    with pytest.raises(DraftError, match="single layer"):
        drafting_layers(LayerSkipOptions(), 1)


# -- drafting ---------------------------------------------------------------------------------------------------------


def drafting(model, layers, **options):
    return engine(model, lambda setting: LayerSkipDrafter(setting.model, setting.cache, layers), **options)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_with_all_layers_every_draft_is_accepted(model, kind, k):
    """So each row lay where it belongs, at its true position, behind the committed ones."""
    found = drafting(model, range(NUM_LAYERS), k=k)
    requests = [found.add(prompt, SamplingParams(max_tokens=17, **KINDS[kind]))[0] for prompt in PROMPTS]
    drain(found)
    for request in requests:
        assert request.stats.per_step_accepted == request.stats.per_step_drafted != []
        # The first step reads the prompt and drafts nothing; a draft never reaches the last token.
        assert request.stats.num_steps == 1 + math.ceil(16 / (k + 1))


@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 5, "temperature": 0.8}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("options", [{}, {"exit_layer": 2}, {"skip_layers": [2]}], ids=str)
def test_the_text_is_the_target_s(model, options, params):
    fast = engine(model, parse({"method": "layer_skip", **options}).build, k=4)
    params = SamplingParams(max_tokens=20, **params)
    wanted = [run(engine(model), prompt, params) for prompt in PROMPTS]
    requests = [fast.add(prompt, params)[0] for prompt in PROMPTS]
    drain(fast)
    assert [tuple(r.output) for r in requests] == wanted
    assert sum(sum(r.stats.per_step_drafted) for r in requests) > 50
    assert fast.num_failed_drafts == 0


def test_a_batch_drafts_what_each_request_drafts_alone(model):
    def drafts(prompts):
        found = drafting(model, (0, 2, 4), k=3)
        requests = [found.add(prompt, SamplingParams(temperature=0, max_tokens=12))[0] for prompt in prompts]
        found.step()
        return [d.tokens for d in found.drafter.propose(requests, [3] * len(requests))], found.drafter.num_passes

    together, num_passes = drafts(PROMPTS)
    alone = [drafts([prompt])[0][0] for prompt in PROMPTS]
    assert together == alone and all(len(tokens) == 3 for tokens in together)
    assert num_passes == 3


def test_drawn_tokens_come_with_their_laws(model):
    found = drafting(model, (0, 2, 4), k=3)
    (request,) = found.add(PROMPTS[0], SamplingParams(max_tokens=12, temperature=0.7, top_k=9))
    found.step()
    (draft,) = found.drafter.propose([request], [3])
    assert draft.probs.shape == (3, model.info.vocab_size)
    assert ((draft.probs > 0).sum(1) == 9).all()
    again = found.drafter.propose([request], [3])[0]
    assert again.tokens == draft.tokens and torch.equal(again.probs, draft.probs)


def test_while_the_prompt_is_unread_nothing_is_drafted():
    table = TableModel(8, sharpness=3)
    found = engine(table, parse({"method": "layer_skip"}).build, k=4, max_num_batched_tokens=5, max_num_seqs=2)
    (request,) = found.add([1, 2, 3] * 4, SamplingParams(temperature=0, max_tokens=12))
    while not request.num_output:
        found.step()
    assert found.drafter.num_passes == 0
    found.step()
    assert found.drafter.num_passes > 0
    drain(found)


def test_shared_pages_are_not_written():
    """The second request finds the first one's pages; its own scratch rows must leave them as they are."""
    table = TableModel(8, num_phases=3, sharpness=3)
    found = engine(table, parse({"method": "layer_skip"}).build, k=4)
    prompt, params = [1, 2, 3, 1, 2, 3, 1, 2, 3, 4, 5], SamplingParams(max_tokens=20, seed=4)
    requests = [found.add(prompt, params)[0] for _ in range(3)]
    drain(found)
    alone = run(engine(table), prompt, params)
    assert [tuple(r.output) for r in requests] == [alone] * 3

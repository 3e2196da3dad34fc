"""fast == plain for encoder-decoder targets: whatever drafts, whatever sources share a batch, through preemption.

Two kinds of target: tiny models of real families, in float64, beside the stock model without any cache; and a table
whose law depends on the source, for what needs exact probabilities.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from pilotfish.decoding.sampling import SamplingParams
from pilotfish.drafters import registry
from pilotfish.errors import DraftError, PromptError
from pilotfish.models.encdec import EncoderDecoder
from pilotfish.models.load import Loaded
from pilotfish.paged.cache import KVCache
from tests.adversaries import method_config, random_trees
from tests.fakes import SourcedTable, drain, engine, oracle
from tests.models.tiny import tiny_model, tiny_pair

UNABLE = {"eagle3", "medusa"}
METHODS = [method for method in registry.methods() if method not in UNABLE]
START = 1
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {"T5 1.1": ("t5", GATED), "Marian": ("marian", {})}
SOURCES = [[(5 * i * i + 3 * i) % 64 for i in range(23)], [7, 8, 9] * 4, [60, 2], [7, 8, 9] * 3]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(seed=11, max_tokens=9),
    SamplingParams(seed=12, temperature=0.7, top_p=0.9, max_tokens=12),
    SamplingParams(seed=14, repetition_penalty=1.4, frequency_penalty=0.3, max_tokens=10),
]


@functools.cache
def tiny(kind: str, seed: int = 0) -> EncoderDecoder:
    family, overrides = KINDS[kind]
    return EncoderDecoder(tiny_pair(family, seed=seed, **overrides))


@functools.cache
def stock(kind: str, source: tuple[int, ...]) -> Any:
    """The logits behind a decoder's text, by the stock model."""
    family, overrides = KINDS[kind]
    model = tiny_pair(family, **overrides)

    @functools.cache
    def logits_of(text: tuple[int, ...]) -> torch.Tensor:
        ids = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([text])}
        with torch.inference_mode():
            return model(**ids, use_cache=False).logits[0, -1]

    return lambda text: logits_of(tuple(text))


@functools.cache
def expected(kind: str) -> list[tuple[int, ...]]:
    return [oracle(stock(kind, tuple(s)), [START], p) for s, p in zip(SOURCES, PARAMS, strict=True)]


def build(method: str, draft: Any) -> Any:
    if method == "trees":
        return lambda _setting: random_trees(64)
    return registry.parse(method_config(method, Loaded(draft, None))).build


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", [*METHODS, "trees"])
def test_texts_are_the_stock_model_s(method: str, kind: str):
    """Together; then short of pages and rows, so that requests are preempted and come back."""
    for options in ({}, {"max_num_batched_tokens": 6, "max_num_seqs": 3, "num_pages": 5}):
        found = engine(tiny(kind), build(method, tiny(kind, 1)), k=4, **options)
        requests = [found.add(s, p)[0] for s, p in zip(SOURCES, PARAMS, strict=True)]
        drain(found)
        assert [tuple(r.output) for r in requests] == expected(kind)
        assert found.num_failed_drafts == 0
        assert not options or found.scheduler.num_preemptions > 0
        assert not found.cache._readings


def test_the_source_decides_the_text():
    """The control of the above."""
    texts = {oracle(stock("T5 1.1", tuple(source)), [START], PARAMS[2]) for source in SOURCES}
    assert len(texts) == len(SOURCES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["draft_model", "staged"])
def test_the_target_as_its_own_draft_is_always_accepted(method: str, kind: str):
    found = engine(tiny(kind), build(method, tiny(kind)), k=4)
    requests = [found.add(s, p)[0] for s, p in zip(SOURCES, PARAMS[:3] + PARAMS[:1], strict=True)]
    drain(found)
    for request in requests:
        assert request.stats.per_step_accepted == request.stats.per_step_drafted
        assert sum(request.stats.per_step_drafted) > 0


def test_completions_of_one_source_share_it_and_those_of_another_do_not():
    model = EncoderDecoder(tiny_pair("t5"))
    reads: list[tuple[int, ...]] = []
    read = model._read
    model._read = lambda source: (reads.append(source), read(source))[1]  # type: ignore[method-assign]
    found = engine(model)
    for source in SOURCES[:2]:
        found.add(source, SamplingParams(n=3, seed=1, max_tokens=9))
    drain(found)
    assert reads == [tuple(source) for source in SOURCES[:2]]


@pytest.mark.parametrize("sound", [True, False])
def test_pages_are_shared_under_the_same_source_only(sound: bool, monkeypatch: pytest.MonkeyPatch):
    """A long beginning of the decoder's text under three sources; then, as the control, pages known by tokens alone."""
    opened = KVCache.open

    def careless(self: KVCache, sequence: str, tokens: Sequence[int], source: Sequence[int], _adapter: str) -> int:
        found = opened(self, sequence, tokens)
        self._sequences[sequence].source = tuple(source)
        return found

    if not sound:
        monkeypatch.setattr(KVCache, "open", careless)
    beginning = [START, *range(10, 22)]
    params = SamplingParams(seed=1, max_tokens=9)
    found = engine(tiny("T5 1.1"))
    right = []
    for source in (SOURCES[0], SOURCES[0], SOURCES[1]):
        (request,) = found.add(beginning, params, source=source)
        drain(found)
        right.append(tuple(request.output) == oracle(stock("T5 1.1", tuple(source)), beginning, params))
    assert right == [True, True, sound]


def test_n_grams_are_copied_from_the_source():
    """The text begins as the source does, and there is nothing else to copy from."""
    for method in ("ngram", "suffix"):
        found = engine(tiny("T5 1.1"), build(method, tiny("T5 1.1")), k=4)
        (request,) = found.add([9, 30, 31, 32, 33, 34], SamplingParams(max_tokens=9))
        request.tokens += [30, 31]
        (draft,) = found.drafter.propose([request], [3])
        assert draft.tokens[:3] == (32, 33, 34)
        found.abort(request)
        assert not getattr(found.drafter, "_source", None)


# -- exact laws ------------------------------------------------------------------------------------------------------

TARGET = SourcedTable(4, order=2, seed=4, sharpness=1.2)
DRAFT = SourcedTable(4, order=1, seed=5, sharpness=1.2, name="draft")


def p_value(drafter: Any, rule: str, source: Sequence[int], claimed: Sequence[int]) -> float:
    """Of the hypothesis that the first two of four tokens follow the law of the source that is claimed."""
    num_runs = 800
    found = engine(
        TARGET, drafter, k=3, rule=rule, entropy=itertools.count().__next__, max_num_seqs=250, num_pages=1000
    )
    requests = [found.add(source, SamplingParams(max_tokens=4))[0] for _ in range(num_runs)]
    others = [found.add([3, 3, 1], SamplingParams(max_tokens=4))[0] for _ in range(20)]
    while found.has_work:
        found.step()
    assert found.num_failed_drafts == 0 and all(request.finish for request in others)
    counts = Counter(tuple(request.output[:2]) for request in requests)
    law = TARGET.joint_law(claimed, 2)
    return float(chisquare([counts[pair] for pair in law], [num_runs * p for p in law.values()]).pvalue)


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        ("draft_model", "rejection"),
        ("draft_model", "block"),
        ("ngram", "rejection"),
        ("layer_skip", "block"),
        ("staged", "rejection"),
    ],
)
def test_unseeded_tokens_follow_the_law_of_their_source(method: str, rule: str):
    assert p_value(build(method, DRAFT), rule, [1, 2, 1], [1, 2, 1]) > 1e-3


def test_the_law_of_another_source_is_told_apart():
    """Negative control."""
    assert p_value(None, "rejection", [1, 2, 1], [1, 2, 2]) < 1e-6


def test_the_table_reads_its_source_from_the_cache():
    """What fakes are for: a request whose source got lost would be noticed."""
    params = SamplingParams(seed=3, max_tokens=12)
    texts = []
    for source in ([1, 2], [1, 3], [2, 1, 1]):
        found = engine(TARGET)
        (request,) = found.add(source, params)
        drain(found)
        texts.append(tuple(request.output))
        assert texts[-1] == oracle(lambda text, own=source: TARGET.after(own, text), [0], params)
    assert len(set(texts)) == 3


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", sorted(UNABLE))
def test_methods_with_trained_heads_say_that_they_cannot(method: str):
    with pytest.raises(DraftError, match=f"method '{method}' is for decoder-only targets"):
        engine(tiny("Marian"), registry.parse({"method": method}).build)


@pytest.mark.parametrize("method", ["draft_model", "staged"])
def test_a_draft_of_the_other_kind_is_refused(method: str):
    from pilotfish.models.huggingface import HuggingFaceLM

    alone, pair = HuggingFaceLM(tiny_model()), tiny("T5 1.1")
    for target, draft in ((pair, alone), (alone, pair)):
        with pytest.raises(DraftError, match="choose a draft of the same kind"):
            engine(target, build(method, draft))


def test_a_source_that_the_draft_cannot_read_is_not_drafted_for():
    short = EncoderDecoder(tiny_pair("marian", seed=1, max_position_embeddings=16))
    found = engine(tiny("Marian"), build("draft_model", short), k=4)
    requests = [found.add(s, p)[0] for s, p in zip(SOURCES, PARAMS, strict=True)]
    drain(found)
    assert [tuple(r.output) for r in requests] == expected("Marian")
    assert [bool(r.stats.per_step_drafted) for r in requests] == [len(s) <= 16 for s in SOURCES]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ([], "the prompt is empty"),
        ([3, 64], "prompt token 64 is not an id from 0 to 63"),
        ([3, -1], "prompt token -1 is not an id"),
        ([3] * 129, "the prompt has 129 tokens and the encoder of .* takes 128"),
    ],
)
def test_sources_that_cannot_be_served(source: list[int], reason: str):
    found = engine(tiny("Marian"))
    with pytest.raises(PromptError, match=reason):
        found.add(source, PARAMS[0])
    assert not found.has_work


def test_a_decoder_only_model_reads_no_source():
    from pilotfish.models.huggingface import HuggingFaceLM

    with pytest.raises(PromptError, match="decoder-only model and reads no source"):
        engine(HuggingFaceLM(tiny_model())).add([1], PARAMS[0], source=[1])

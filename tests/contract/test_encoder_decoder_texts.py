"""Whole texts of every encoder-decoder family, beside transformers' own generate.

Random weights in float64. At temperature 1 generate is given the coupled choice as a processor of logits, so its loop,
its encoder and its way to the end of a text are the oracle; drafts, pages and batches are ours.
"""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from pilotfish.decoding.noise import fold, race
from pilotfish.decoding.sampling import SamplingParams
from pilotfish.drafters import registry
from pilotfish.models.encdec import EncoderDecoder
from pilotfish.models.load import Loaded
from tests.adversaries import random_trees
from tests.contract.test_encoder_decoders import CASES
from tests.fakes import drain, engine
from tests.models.tiny import tiny_pair

FAMILIES = ["T5", "T5 1.1", "mT5", "BART", "Marian"]
SOURCES = [[3, 41, 5, 17, 60, 22, 9], [2], [(5 * i * i) % 64 for i in range(23)]]
NUM_TOKENS, SEED = 9, 21
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
COUPLED = SamplingParams(temperature=1, seed=SEED, max_tokens=NUM_TOKENS)


class Coupled(LogitsProcessor):
    """Leaves one token: the winner of the race at this place."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        winner = race(fold(SEED, 0), input_ids.shape[1], torch.softmax(scores[0].float(), 0))
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([winner]), 0.0)


def pair(family: str, seed: int = 0) -> Any:
    kind, overrides = CASES[family]
    return tiny_pair(kind, seed=seed, **overrides)


def generated(model: Any, source: Sequence[int], params: SamplingParams) -> list[int]:
    """By transformers alone, without its cache (which expects as many encoder as decoder layers)."""
    processors = LogitsProcessorList([] if params.greedy else [Coupled()])
    ids = torch.tensor([source])
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "use_cache": False}
    with torch.inference_mode():
        found: list[int] = model.generate(ids, logits_processor=processors, **options)[0, 1:].tolist()
    return found


@functools.cache
def expected(family: str, greedy: bool) -> list[list[int]]:
    model = pair(family)
    return [generated(model, source, GREEDY if greedy else COUPLED) for source in SOURCES]


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "coupled"])
@pytest.mark.parametrize("drafts", ["chains", "trees"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_unequal_sources_is_what_generate_says(family: str, drafts: str, greedy: bool):
    draft = Loaded(EncoderDecoder(pair(family, seed=1)), None)
    build: Any = lambda _setting: random_trees(64)  # noqa: E731
    if drafts == "chains":
        build = registry.parse({"method": "draft_model", "model": draft}).build
    found = engine(EncoderDecoder(pair(family)), build, k=4)
    requests = [found.add(source, GREEDY if greedy else COUPLED)[0] for source in SOURCES]
    drain(found)
    assert [request.output for request in requests] == expected(family, greedy)
    assert all(request.stats.per_step_drafted for request in requests)


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "coupled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_ends_inside_of_an_accepted_run(family: str, greedy: bool):
    """The target drafts for itself, so that whole runs are accepted; its end of text is a token that it says midway."""
    params = GREEDY if greedy else COUPLED
    for seed in range(9):
        model = pair(family, seed)
        source, text = SOURCES[seed % 3], generated(model, SOURCES[seed % 3], params)
        if (end := max(text.index(token) for token in text[:-1])) >= 2:  # else it repeats its first token
            break
    assert end >= 2
    model.generation_config.eos_token_id = text[end]
    right = generated(model, source, params)
    assert right == text[: end + 1]
    wrapped = EncoderDecoder(model)
    found = engine(wrapped, registry.parse({"method": "draft_model", "model": Loaded(wrapped, None)}).build, k=9)
    (request,) = found.add(source, params)
    drain(found)
    assert request.output == right and request.finish == "stop"
    assert request.stats.per_step_accepted == [end + 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_sources_seeds_and_models_count(family: str):
    """The control of the above: texts that were all alike would hide much."""
    texts = [tuple(text) for text in expected(family, False)]
    assert len(set(texts)) == len(SOURCES) and texts != [tuple(text) for text in expected(family, True)]
    assert generated(pair(family, seed=1), SOURCES[0], COUPLED) != list(texts[0])

"""Whole texts of Whisper models, beside transformers' own generate, which also suppresses tokens and begins the text.

Random weights in float64. At temperature 1 generate is given the coupled choice as a processor of logits, so its loop,
its encoder, its rules and its way to the end of a text are the oracle; drafts, pages and batches are ours.
"""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from pilotfish.decoding.noise import fold, race
from pilotfish.decoding.sampling import SamplingParams
from pilotfish.decoding.source import Features
from pilotfish.drafters import registry
from pilotfish.models.encdec import EncoderDecoder
from pilotfish.models.load import Loaded
from pilotfish.models.speech import Speech
from tests.adversaries import method_config, random_trees
from tests.fakes import drain, engine
from tests.models.tiny import sound, tiny_pair

START, NO_TIMESTAMPS = 1, 63
RULES = {"suppress_tokens": [5, 17, 40, 41, 60, 999], "begin_suppress_tokens": [22, 9, 33]}
SOUNDS = [sound(1), sound(2), sound(3), sound(1)]
BEGINNINGS = [[], [START, 7, NO_TIMESTAMPS], [50, 30, 31, START, NO_TIMESTAMPS], [7, 8, NO_TIMESTAMPS]]
BEGUN = [[START, NO_TIMESTAMPS], *BEGINNINGS[1:3], [START, *BEGINNINGS[3]]]
NUM_TOKENS, SEED = 9, 21
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
COUPLED = SamplingParams(temperature=1, seed=SEED, max_tokens=NUM_TOKENS)
METHODS = [method for method in registry.methods() if method not in ("eagle3", "medusa")]


class Coupled(LogitsProcessor):
    """Leaves one token: the winner of the race at this place."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        winner = race(fold(SEED, 0), input_ids.shape[1], torch.softmax(scores[0], 0))
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([winner]), 0.0)


def hearing(seed: int = 0, **settings: Any) -> Any:
    """A tiny Whisper with a generation config like that of a real one; settings: fields of it."""
    model: Any = tiny_pair("whisper", seed=seed)
    for key, value in {"no_timestamps_token_id": NO_TIMESTAMPS, **RULES, **settings}.items():
        setattr(model.generation_config, key, value)
    return model


def generated(
    model: Any, features: Features, params: SamplingParams, beginning: Sequence[int] = (), **more: Any
) -> list[int]:
    """By transformers alone: what it says behind the beginning."""
    given = {"decoder_input_ids": torch.tensor([beginning])} if beginning else {}
    found: list[int] = model.generate(
        features.values[None],
        max_new_tokens=params.max_tokens,
        do_sample=False,
        logits_processor=LogitsProcessorList([] if params.greedy else [Coupled()]),
        force_unique_generate_call=True,  # with the beginning and the end of text
        **given,
        **more,
    )[0].tolist()
    num_begun = len(beginning) or len(found) - params.max_tokens
    assert not beginning or found[:num_begun] == list(beginning)
    return found[num_begun:]


@functools.cache
def expected(greedy: bool) -> list[list[int]]:
    model, params = hearing(), GREEDY if greedy else COUPLED
    return [generated(model, *pair) for pair in zip(SOUNDS, [params] * 4, BEGUN, strict=True)]


def build(method: str) -> Any:
    if method == "trees":
        return lambda _setting: random_trees(64)
    return registry.parse(method_config(method, Loaded(EncoderDecoder(hearing(1)), None))).build


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "coupled"])
@pytest.mark.parametrize("method", [*METHODS, "trees"])
def test_a_batch_of_unequal_sounds_and_beginnings_is_what_generate_says(method: str, greedy: bool):
    """Together; then short of pages and rows, so that requests are preempted and hear their sounds again."""
    for options in ({}, {"max_num_batched_tokens": 6, "max_num_seqs": 3, "num_pages": 4}):
        found = engine(EncoderDecoder(hearing()), build(method), k=4, **options)
        params = GREEDY if greedy else COUPLED
        requests = [found.add(b, params, source=s)[0] for b, s in zip(BEGINNINGS, SOUNDS, strict=True)]
        drain(found)
        assert [list(request.prompt) for request in requests] == BEGUN
        assert [request.output for request in requests] == expected(greedy)
        assert found.num_failed_drafts == 0 and not found.cache._readings
        assert not options or found.scheduler.num_preemptions > 0
        if method in ("draft_model", "staged", "layer_skip", "trees"):
            assert all(request.stats.per_step_drafted for request in requests)


def test_the_usual_beginning_is_generate_s():
    """Without any given, and with forced tokens, a language and a task of the config."""
    tokens = {"lang_to_id": {"<|en|>": 50, "<|de|>": 51}, "task_to_id": {"transcribe": 52, "translate": 53}}
    for settings, begun in (
        ({}, [START, NO_TIMESTAMPS]),
        ({"no_timestamps_token_id": None}, [START]),
        ({"forced_decoder_ids": [[1, 50], [2, 52]]}, [START, 50, 52, NO_TIMESTAMPS]),
        ({"forced_decoder_ids": [[1, 50], [2, 52], [3, NO_TIMESTAMPS]], **tokens}, [START, 50, 52, NO_TIMESTAMPS]),
        ({"forced_decoder_ids": [[2, 52]]}, [START, NO_TIMESTAMPS]),
        ({"language": "german", **tokens}, [START, 51, 52, NO_TIMESTAMPS]),
        ({"language": "<|en|>", "task": "translate", **tokens}, [START, 50, 53, NO_TIMESTAMPS]),
        ({"task": "translate", "task_to_id": tokens["task_to_id"]}, [START, 53, NO_TIMESTAMPS]),
        ({"forced_decoder_ids": [[1, 50]], "language": "de", "task": "transcribe", **tokens},
         [START, 51, 52, NO_TIMESTAMPS]),
    ):  # fmt: skip
        model = hearing(**settings)
        if settings.get("no_timestamps_token_id", 0) is None:
            del model.generation_config.no_timestamps_token_id
        told = model.generate(sound().values[None], max_new_tokens=4, do_sample=False, force_unique_generate_call=True)
        found = engine(EncoderDecoder(model))
        (request,) = found.add([], SamplingParams(temperature=0, max_tokens=4), source=sound())
        drain(found)
        assert list(request.prompt) == begun, settings
        assert request.tokens == told[0].tolist()


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "coupled"])
def test_a_text_ends_inside_of_an_accepted_run(greedy: bool):
    """The target drafts for itself, so that whole runs are accepted; its end of text is a token that it says midway."""
    params = GREEDY if greedy else COUPLED
    texts = ((seed, generated(hearing(seed), SOUNDS[0], params, BEGUN[1])) for seed in range(20))
    seed, text, end = next(
        (seed, text, end) for seed, text in texts if (end := max(text.index(token) for token in text[:-1])) >= 2
    )
    model = hearing(seed, eos_token_id=text[end])
    right = generated(model, SOUNDS[0], params, BEGUN[1])
    assert right == text[: end + 1]
    wrapped = EncoderDecoder(model)
    found = engine(wrapped, registry.parse({"method": "draft_model", "model": Loaded(wrapped, None)}).build, k=9)
    (request,) = found.add(BEGUN[1], params, source=SOUNDS[0])
    drain(found)
    assert request.output == right and request.finish == "stop"
    assert request.stats.per_step_accepted == [end + 1]


def test_the_target_as_its_own_draft_is_always_accepted():
    """Also where the first token is one that may not be the first."""
    wrapped = EncoderDecoder(hearing())
    found = engine(wrapped, registry.parse({"method": "draft_model", "model": Loaded(wrapped, None)}).build, k=4)
    params = SamplingParams(temperature=1, max_tokens=NUM_TOKENS)
    requests = [found.add(b, params, source=s)[0] for b, s in zip(BEGINNINGS, SOUNDS, strict=True)]
    drain(found)
    for request in requests:
        assert request.stats.per_step_accepted == request.stats.per_step_drafted
        assert sum(request.stats.per_step_drafted) > 0
        assert not {5, 17, 40, 41, 60} & set(request.output) and request.output[0] not in (22, 9, 33)


@pytest.mark.parametrize("key", RULES)
def test_each_rule_matters(key: str, monkeypatch: pytest.MonkeyPatch):
    """The control: sounds where stock generate would say such tokens; and without our rule, it is seen."""
    without = hearing(**{key: None})
    banned = set(RULES[key])
    said = [(sound(i), generated(without, sound(i), GREEDY, BEGUN[0])) for i in range(40, 52)]
    said = [one for one in said if banned & set(one[1][:1] if key == "begin_suppress_tokens" else one[1])][:2]
    assert said, "no sound makes the model say one"
    for sound_, text in said:
        right = generated(hearing(), sound_, GREEDY, BEGUN[0])
        assert right != text
        for ruled in (True, False):
            with monkeypatch.context() as patch:
                if not ruled:
                    patch.setattr(Speech, "ruled", lambda self, params: params)
                found = engine(EncoderDecoder(hearing()), build("trees"), k=4)
                (request,) = found.add([], GREEDY, source=sound_)
                drain(found)
            assert (request.output == right) == ruled


def test_sounds_seeds_and_beginnings_count():
    """The control of the above: texts that were all alike would hide much."""
    texts = [tuple(text) for text in expected(False)]
    assert len(set(texts)) == 4 and expected(True) != expected(False)
    assert generated(hearing(1), SOUNDS[0], COUPLED, BEGUN[0]) != expected(False)[0]


def test_a_sound_is_heard_once_and_told_apart_by_every_bit():
    model = EncoderDecoder(hearing())
    heard: list[Features] = []
    read = model._read
    model._read = lambda source: (heard.append(source), read(source))[1]  # type: ignore[method-assign, arg-type]
    found = engine(model)
    twin = Features(SOUNDS[0].values.clone())
    other = SOUNDS[0].values.clone()
    other[0, 0] = other[0, 0].nextafter(torch.tensor(9.0, dtype=torch.float64))
    for source in (SOUNDS[0], twin, Features(other), Features(SOUNDS[0].values.float())):
        found.add([], SamplingParams(n=2, seed=1, max_tokens=9), source=source)
    drain(found)
    assert [one.digest for one in heard] == [
        SOUNDS[0].digest, Features(other).digest, Features(SOUNDS[0].values.float()).digest]  # fmt: skip
    assert twin == SOUNDS[0] and len({one.digest for one in heard}) == 3
    parents = [parent for parent, _ in found.cache.pool._page_of if isinstance(parent, tuple)]
    assert parents and all(isinstance(part, str) for parent in parents for part in parent), "pages keep no numbers"

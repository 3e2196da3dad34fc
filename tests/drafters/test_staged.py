"""Staged drafting: the draft model's own proposals, token for token and law for law, in fewer of its passes."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pilotfish.decoding.draft import EMPTY, Draft, chain
from pilotfish.decoding.noise import SeededNoise, race
from pilotfish.decoding.request import Request
from pilotfish.decoding.sampling import SamplingParams
from pilotfish.drafters.base import Drafter, Setting
from pilotfish.drafters.draft_model import DraftModelDrafter
from pilotfish.drafters.ngram import NgramDrafter
from pilotfish.drafters.registry import parse
from pilotfish.drafters.staged import StagedDrafter, _first_path
from pilotfish.errors import DraftError, OptionError
from pilotfish.models.base import CausalLM
from pilotfish.models.huggingface import HuggingFaceLM
from pilotfish.models.load import Loaded
from tests.adversaries import Scripted, guesser
from tests.fakes import TableModel, drain, engine, run
from tests.models.tiny import tiny_model

KINDS = {"greedy": {"temperature": 0}, "seeded": {"seed": 7}, "sampled": {}}
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [4, 5, 4, 5, 4], [6, 1, 2, 2, 3, 5, 0, 7, 1, 1, 4]]
LOOPING = TableModel(8, order=1, seed=1, sharpness=6)  # nearly deterministic, so it runs into loops


class Both(Drafter):
    """Asks a plain and a staged drafter, and checks that they say the same."""

    def __init__(self, plain: DraftModelDrafter, staged: StagedDrafter):
        self.plain, self.staged, self.num_calls = plain, staged, 0

    def propose(self, requests: Sequence[Any], limits: Sequence[int]) -> list[Draft]:
        self.num_calls += 1
        wanted = self.plain.propose(requests, limits)
        if isinstance(self.plain.model, TableModel):
            for request, one in zip(requests, wanted, strict=True):
                assert one.tokens == without_a_cache(self.plain.model, request, len(one))
        for one, other in zip(wanted, self.staged.propose(requests, limits), strict=True):
            assert one.tokens == other.tokens and one.parents == other.parents
            assert (one.probs is None) == (other.probs is None)
            if one.probs is not None:
                torch.testing.assert_close(one.probs, other.probs, rtol=0, atol=1e-9)
        return wanted

    def release(self, request: Any) -> None:
        self.plain.release(request)
        self.staged.release(request)


def without_a_cache(draft: TableModel, request: Any, num_tokens: int) -> tuple[int, ...]:
    """What a draft model says, from its laws alone."""
    tokens: list[int] = []
    for depth in range(num_tokens):
        logits_V = draft.logits_of(request.tokens + tokens)
        if request.params.greedy:
            tokens.append(int(logits_V.argmax()))
        elif request.rule == "coupled":
            tokens.append(race(request.seed, len(request.tokens) + depth, logits_V.softmax(0)))
        else:
            tokens.append(SeededNoise(request.seed, len(request.tokens)).draw(depth, logits_V.softmax(0)))
    return tuple(tokens)


def both(target: CausalLM, draft: CausalLM, inner: Any, params: SamplingParams, k: int, **options: Any) -> Both:
    """Both drafters through a few requests, and what came of it."""

    def build(setting: Setting) -> Both:
        plain = parse({"method": "draft_model", "model": Loaded(draft, None)}).build(setting)
        if callable(inner):
            staged: Any = StagedDrafter(draft, inner, setting)
        else:
            staged = parse({"method": "staged", "model": Loaded(draft, None), "inner": inner}).build(setting)
        return Both(plain, staged)

    found = engine(target, build, k=k, **options)
    for prompt in PROMPTS:
        found.add(prompt, params)
    drain(found)
    assert found.num_failed_drafts == 0
    return found.drafter


def inner_drafters() -> dict[str, Any]:
    other = Loaded(TableModel(8, order=1, seed=4, name="smallest"), None)
    return {
        "ngram": "ngram",
        "suffix": "suffix",
        "bounded": {"method": "ngram", "num_speculative_tokens": 1},
        "draft_model": {"method": "draft_model", "model": other},
        "staged": {
            "method": "staged",
            "model": other,
            "inner": {"method": "staged", "model": other, "inner": "suffix"},
        },
        "first_of": {"method": "first_of", "drafters": ["ngram", {"method": "draft_model", "model": other}]},
        "layer_skip": "layer_skip",
        "random guesses": lambda _setting: guesser(8),
        "too many guesses": lambda _setting: guesser(8, too_many=4),
        "ids beyond the table": lambda _setting: guesser(8, offset=4),
        "none": lambda _setting: Scripted(lambda _request, _limit: EMPTY),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inner", inner_drafters())
def test_it_proposes_what_the_draft_model_proposes(inner, kind):
    target, draft = TableModel(8, num_phases=3, sharpness=2), TableModel(8, num_phases=2, seed=5, sharpness=2)
    for k in range(1, 9):
        both(target, draft, inner_drafters()[inner], SamplingParams(max_tokens=10, **KINDS[kind]), k)


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_real_architecture(kind):
    target, draft = (HuggingFaceLM(tiny_model(seed=seed), self_check=False) for seed in (0, 1))
    smallest = Loaded(HuggingFaceLM(tiny_model(seed=1, num_hidden_layers=1), self_check=False), None)
    inner = {"method": "first_of", "drafters": ["ngram", {"method": "draft_model", "model": smallest}]}
    both(target, draft, inner, SamplingParams(max_tokens=12, **KINDS[kind]), 5)


def test_with_chunked_prompts_and_few_pages():
    target, draft = TableModel(8, num_phases=3), TableModel(8, num_phases=2, seed=5)
    options = {"max_num_batched_tokens": 4, "max_num_seqs": 3, "num_pages": 12}
    for k in (1, 3, 8):
        both(target, draft, "suffix", SamplingParams(max_tokens=16, seed=2), k, **options)


@pytest.mark.parametrize("inner", ["ngram", "suffix"])
def test_on_text_that_repeats_it_saves_passes(inner):
    found = both(LOOPING, LOOPING, inner, SamplingParams(temperature=0, max_tokens=60), 8)
    assert found.staged.num_passes < 0.5 * found.plain.num_passes


@pytest.mark.parametrize(("bound", "num_passes"), [(63, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_an_inner_drafter_like_the_draft_model_is_always_right(kind, bound, num_passes):
    """Its guesses are the very choices, drawn ones too, since both meet the same coins at each place."""
    draft = TableModel(8, num_phases=2, seed=5, sharpness=1)
    found = engine(
        TableModel(8, num_phases=3, sharpness=1.2),
        lambda setting: StagedDrafter(
            draft, lambda inside: DraftModelDrafter(draft, inside), setting, inner_limit=bound
        ),
        k=6,
    )
    (request,) = found.add(PROMPTS[0], SamplingParams(max_tokens=8, **KINDS[kind]))
    found.step()  # one draft of 6, with bound + 1 tokens a pass
    assert found.drafter.num_passes == num_passes and len(request.stats.per_step_drafted) == 1
    drain(found)


def test_other_coins_would_cost_passes():
    """The control: an inner draft model that meets other coins guesses wrong now and then."""
    draft = TableModel(8, num_phases=2, seed=5, sharpness=1)

    class OtherSeed(DraftModelDrafter):
        def propose(self, requests, limits):
            for request in requests:
                request.seed += 1  # these are copies
            return super().propose(requests, limits)

    found = both(
        TableModel(8, num_phases=3), draft, lambda setting: OtherSeed(draft, setting), SamplingParams(max_tokens=20), 6
    )
    assert found.staged.num_passes > 2 * found.num_calls


def test_every_token_is_read_once():
    draft = TableModel(8, order=1, seed=1, sharpness=6)
    found = engine(LOOPING, lambda setting: DraftModelDrafter(draft, setting), k=5)
    run(found, PROMPTS[0], SamplingParams(temperature=0, max_tokens=31))
    assert draft.num_rows <= len(PROMPTS[0]) + 31
    assert draft.num_passes <= 31


def test_pages_found_for_guessed_tokens_are_not_taken_for_settled_ones():
    draft = TableModel(8, num_phases=2, seed=5)
    found = engine(TableModel(8), lambda setting: DraftModelDrafter(draft, setting)).drafter
    text, params = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3], SamplingParams(temperature=0)

    def proposed(name: str, tokens: list[int], num_guessed: int = 0) -> None:
        request = Request(name, tuple(tokens), params, 0, "rejection", 100, num_guessed=num_guessed)
        assert found.propose([request], [3])[0].tokens == without_a_cache(draft, request, 3)

    proposed("first", text)  # leaves two pages that can be shared
    proposed("second", text, num_guessed=5)
    proposed("second", [*text[:5], 0, 0, 0])


def test_a_drafter_that_guesses_nothing_saves_nothing():
    found = both(
        LOOPING, LOOPING, lambda _setting: Scripted(lambda _r, _k: EMPTY), SamplingParams(max_tokens=20, seed=1), 5
    )
    assert found.staged.num_passes == found.plain.num_passes


def test_a_draft_equal_to_the_target_is_accepted_whole():
    speculation = parse({"method": "staged", "model": Loaded(LOOPING, None), "inner": "suffix"})
    found = engine(LOOPING, speculation.build, k=5)
    (request,) = found.add(PROMPTS[0], SamplingParams(temperature=0, max_tokens=31))
    drain(found)
    assert request.stats.per_step_accepted == request.stats.per_step_drafted == [5] * 5


def test_the_inner_drafter_sees_how_far_the_draft_has_come():
    seen = []

    def note(request: Any, limit: int) -> Draft:
        seen.append((len(request.tokens) - len(PROMPTS[0]), request.num_guessed, limit, request.id))
        return EMPTY

    setting_of = engine(LOOPING, lambda setting: StagedDrafter(LOOPING, lambda _setting: Scripted(note), setting), k=4)
    (request,) = setting_of.add(PROMPTS[0], SamplingParams(temperature=0, max_tokens=10))
    setting_of.step()
    assert seen == [(0, 0, 3, request.id), (1, 1, 2, request.id), (2, 2, 1, request.id)]
    assert request.num_guessed == 0


def test_of_a_tree_the_first_path_is_fed():
    assert _first_path(Draft((5, 6, 7, 8, 9), (-1, -1, 0, 1, 2))) == [5, 7, 9]
    assert _first_path(chain([1, 2])) == [1, 2]
    assert _first_path(EMPTY) == []


def test_the_inner_drafter_works_where_the_draft_model_is_the_target():
    small = TableModel(6, name="small")
    settings: list[Setting] = []

    def build_inner(setting: Setting) -> Drafter:
        settings.append(setting)
        return NgramDrafter()

    drafter = engine(TableModel(8), lambda setting: StagedDrafter(small, build_inner, setting)).drafter
    (inside,) = settings
    assert (inside.target, inside.model, inside.cache) == (small.info, small, drafter.cache)
    assert not inside.trees


def test_a_draft_model_with_a_smaller_table_stays_within_it():
    draft = TableModel(6, num_phases=2, seed=5)
    both(TableModel(8, num_phases=3), draft, lambda _setting: guesser(8), SamplingParams(max_tokens=20), 5)


@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 5}], ids=["greedy", "seeded"])
def test_the_text_is_the_target_s(params):
    model = HuggingFaceLM(tiny_model(), self_check=False)
    draft = Loaded(HuggingFaceLM(tiny_model(tie_word_embeddings=True, num_hidden_layers=1), self_check=False), None)
    fast = engine(model, parse({"method": "staged", "model": draft, "inner": "suffix"}).build, k=5)
    params = SamplingParams(max_tokens=20, **params)
    wanted = [run(engine(model), prompt, params) for prompt in PROMPTS]
    requests = [fast.add(prompt, params)[0] for prompt in PROMPTS]
    drain(fast)
    assert [tuple(r.output) for r in requests] == wanted
    assert fast.num_failed_drafts == 0


def test_what_does_not_fit_is_refused():
    with pytest.raises(OptionError, match="did you mean 'ngram'"):
        parse({"method": "staged", "model": "demo", "inner": "ngrm"})
    with pytest.raises(DraftError, match="'staged' needs a draft model"):
        engine(TableModel(8), parse({"method": "staged"}).build)
    wants_states = Scripted(lambda _request, _limit: EMPTY)
    wants_states.taps = (1,)
    with pytest.raises(DraftError, match="hands out none"):
        engine(TableModel(8), lambda setting: StagedDrafter(LOOPING, lambda _setting: wants_states, setting))


class Failing(Drafter):
    """Fails, or gives too little, for texts of some lengths: in the middle of a draft of which tokens were drawn."""

    def __init__(self, short: bool):
        self.short = short

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        if any(len(request.tokens) % 3 == 0 for request in requests):
            if self.short:
                return []
            raise RuntimeError("no idea")
        return [EMPTY] * len(requests)


@pytest.mark.parametrize("short", [False, True])
def test_an_inner_drafter_that_fails_loses_no_drawn_token(short: bool) -> None:
    """Else a draft would be dropped because of the tokens in it."""
    target, small = TableModel(8, seed=3), TableModel(8, seed=4)

    def build(setting: Setting) -> Both:
        return Both(DraftModelDrafter(small, setting), StagedDrafter(small, lambda _inside: Failing(short), setting))

    found = engine(target, build, k=4)
    found.add([1, 2, 3], SamplingParams(max_tokens=40))
    drain(found)
    assert found.num_failed_drafts == 0

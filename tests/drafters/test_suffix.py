"""Suffix decoding: which places are found, how they are weighed, what is remembered of finished answers."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from pilotfish.decoding.draft import EMPTY
from pilotfish.decoding.request import Request, Step
from pilotfish.decoding.sampling import SamplingParams
from pilotfish.decoding.verify import match
from pilotfish.drafters.base import Drafter
from pilotfish.drafters.ngram import NgramDrafter
from pilotfish.drafters.registry import parse
from pilotfish.drafters.suffix import NUM_PLACES, SuffixDrafter, SuffixOptions
from pilotfish.errors import OptionError
from pilotfish.models.huggingface import HuggingFaceLM
from tests.fakes import TableModel, drain, engine, oracle, run
from tests.models.tiny import tiny_model


def drafter(**options: Any) -> SuffixDrafter:
    return SuffixDrafter(SuffixOptions(**{f"suffix_decoding_{name}": value for name, value in options.items()}))


def request(tokens: Sequence[int], name: str = "r", num_prompt: int | None = None, **more: Any) -> Request:
    made = Request(name, tuple(tokens[:num_prompt]), SamplingParams(temperature=0), 0, "rejection", 10**6, **more)
    made.tokens = list(tokens)
    return made


def draft(tokens: Sequence[int], limit: int = 8, found: SuffixDrafter | None = None, **more: Any) -> Any:
    (result,) = (found or drafter()).propose([request(tokens, **more)], [limit])
    return result


def finish(found: SuffixDrafter, answer: Sequence[int], name: str) -> None:
    """A request whose answer this was, from its first step to its end."""
    done = request([900, *answer], name, num_prompt=1)
    found.observe([Step(done, range(1))], {})
    found.release(done)


# -- one text ---------------------------------------------------------------------------------------------------------


def test_what_followed_is_drafted():
    assert draft([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], limit=3).tokens == (4, 5, 6)
    assert not len(draft([1, 2, 3, 4, 5]))


def test_a_loop_is_drafted_as_a_loop():
    assert draft([7, 8, 9] * 4, limit=7).tokens == (7, 8, 9, 7, 8, 9, 7)


def test_the_more_frequent_continuation_comes_first_and_the_other_beside_it():
    tree = draft([1, 2, 5, 0, 1, 2, 6, 0, 1, 2, 5, 3, 1, 2], limit=2)
    assert tree.tokens == (5, 6) and tree.parents == (-1, -1)


def test_a_longer_match_outweighs_many_shorter_ones():
    text = [*[2, 3, 9] * 4, 8, 1, 2, 3, 5, 8, 1, 2, 3]
    assert draft(text, limit=1).tokens == (5,)
    assert draft([*text[:-4], 7, 2, 3], limit=1).tokens == (9,)  # without it the frequent one wins


def test_chains_only():
    text = [1, 2, 5, 0, 1, 2, 6, 0, 1, 2, 5, 3, 1, 2]
    assert draft(text, found=drafter(trees=False)).is_chain
    assert not draft(text).is_chain
    assert drafter().trees and not drafter(trees=False).trees


def test_under_block_verification_it_drafts_chains():
    found = engine(TableModel(6), parse({"method": "suffix"}).build, rule="block")
    assert not found.drafter.trees
    assert engine(TableModel(6), parse({"method": "suffix"}).build).drafter.trees


def test_the_factor_bounds_the_depth():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 2]
    assert [len(draft(text, 8, drafter(max_spec_factor=f, min_token_prob=0))) for f in (0.5, 1, 2, 9)] == [1, 2, 4, 8]


def test_the_depth_is_the_longest_match_told_apart():
    text = [1, 2, 3, 4, 0, 1, 2, 3, 5, 9, 2, 3, 6, 1, 2, 3]
    assert draft(text, 1).tokens in ((4,), (5,))
    shallow = drafter(max_tree_depth=1)
    # All three places look alike to it, so each has a third of the weight, and one token of match is worth 1 / 2.5.
    assert len(draft(text, 8, shallow)) == 3
    assert len(draft(text, 8, drafter(max_tree_depth=1, min_token_prob=0.14))) == 0


def test_unlikely_guesses_are_left_out():
    common = [token for i in range(10, 30) for token in (1, i)] + [1]  # many different tokens followed this one
    assert not len(draft(common))
    assert len(draft(common, found=drafter(min_token_prob=0)))


def test_nothing_is_drafted_behind_the_end_of_text():
    text = [1, 2, 3, 50, 4, 5, 1, 2]
    assert draft(text, stop_ids=frozenset({50})).tokens == (3, 50)
    assert draft(text).tokens[:3] == (3, 50, 4)


def test_nodes_are_at_most_the_limit_and_parents_come_first():
    source = random.Random(3)
    text = [source.randrange(4) for _ in range(300)]
    found = drafter(min_token_prob=0)
    for end in range(2, 300):
        for limit in (1, 3, 8):
            (tree,) = found.propose([request(text[:end])], [limit])
            assert len(tree) <= limit  # the rest is checked by Draft itself


def test_a_step_looks_at_a_bounded_number_of_places():
    found = drafter()
    assert max(len(found._matches(request([5] * n))) for n in (10, 400)) < 2 * NUM_PLACES


def test_guessed_tokens_are_looked_up_but_not_remembered():
    found = drafter()
    assert found.propose([request([1, 2, 3, 4, 0, 7, 8, 1], num_guessed=3)], [1])[0].tokens == (2,)
    text = [1, 2, 3, 4, 0, 5, 6, 9]  # the guesses were wrong
    assert not len(found.propose([request([*text, 7])], [1])[0])
    assert found.propose([request([*text, 7, 5])], [1])[0].tokens == (6,)


def test_the_reference_is_copied_and_preferred():
    reference = (1, 2, 3, 4, 5)
    assert draft([9, 1, 2], limit=3, reference=reference).tokens == (3, 4, 5)
    assert draft([2, 7, 0, 2], limit=1, reference=reference).tokens == (3,)
    assert draft([2, 7, 0, 2], limit=1).tokens == (7,)


# -- finished answers -------------------------------------------------------------------------------------------------


def test_finished_answers_are_found():
    found = drafter()
    finish(found, [1, 2, 3, 4, 5], "a")
    assert draft([8, 1, 2], 3, found).tokens == (3, 4, 5)
    assert not len(draft([8, 1, 2], 3, drafter()))


def test_the_request_s_own_text_counts_more():
    found = drafter()
    finish(found, [1, 2, 6], "a")
    assert draft([1, 2, 5, 1, 2], 1, found).tokens == (5,)


def test_the_least_recently_used_answer_is_forgotten_first():
    found = drafter(max_cached_requests=2)
    finish(found, [1, 2, 3, 4], "a")
    finish(found, [5, 6, 7, 8], "b")
    assert draft([1, 2], 1, found).tokens == (3,)  # a is used, so b is the oldest now
    finish(found, [10, 11, 12], "c")
    assert len(found.answers) == 2
    assert draft([9, 1, 2], 1, found).tokens == (3,)
    assert not len(draft([9, 5, 6], 1, found))
    assert draft([9, 10, 11], 1, found).tokens == (12,)


def test_answers_are_bounded_by_their_tokens():
    found = drafter(max_cached_tokens=12)
    for i in range(10):
        finish(found, [100 * i + 1, 100 * i + 2, 100 * i + 3], str(i))  # 4 tokens each: one is the prompt's
        assert found.answers.num_tokens <= 12
    assert len(found.answers) == 3
    finish(found, range(1000, 1020), "too long alone")
    assert len(found.answers) == 3


def test_forgetting_leaves_nothing_behind():
    found, source = drafter(max_cached_requests=1), random.Random(1)
    for i in range(50):
        finish(found, [source.randrange(5) for _ in range(30)], str(i))
    only = drafter(max_cached_requests=1)
    last = found.answers._texts[next(iter(found.answers._texts))]
    only.answers.add(last)
    assert len(found.answers._places) == len(only.answers._places)


def test_no_answers_are_kept_if_none_are_wanted():
    found = drafter(max_cached_requests=0)
    finish(found, [1, 2, 3], "a")
    assert len(found.answers) == 0


def test_an_answer_released_twice_is_kept_once():
    found = drafter()
    done = request([9, 1, 2, 3], num_prompt=1)
    found.propose([done], [4])
    found.release(done)
    found.release(done)
    assert len(found.answers) == 1


def test_answers_of_requests_that_others_drafted_for_are_kept():
    target = TableModel(6, seed=2)
    found = engine(target, parse({"method": "first_of", "drafters": ["ngram", "suffix"]}).build)
    for _ in range(3):
        run(found, [1, 2, 3, 1, 2], SamplingParams(temperature=0, max_tokens=12))
    assert len(found.drafter.members[1].answers) == 3


# -- how good ---------------------------------------------------------------------------------------------------------


def mean_accepted_length(found: Drafter, text: Sequence[int], num_prompt: int, limit: int) -> float:
    """Tokens per step if this is the target's text; drafting is replayed against it, no model runs."""
    reader, num_steps = request(text[:num_prompt], num_prompt=num_prompt), 0
    while len(reader.tokens) < len(text):
        place, tree = len(reader.tokens), EMPTY
        if most := min(limit, len(text) - place - 1):
            (tree,) = found.propose([reader], [most])
        accepted = match(tree, lambda _row, depth, place=place: text[place + depth]).path
        reader.tokens += text[place : place + len(accepted) + 1]
        num_steps += 1
    found.release(reader)
    return (len(text) - num_prompt) / num_steps


def ordinary_text(seed: int, num_tokens: int = 600) -> list[int]:
    """Words of one to four tokens, some frequent, most rare; now and then a passage is repeated, with slips."""
    source = random.Random(seed)
    words = [[source.randrange(400) for _ in range(source.randint(1, 4))] for _ in range(150)]
    text: list[int] = []
    while len(text) < num_tokens:
        if text and source.random() < 0.1:
            start = source.randrange(len(text))
            passage = text[start : start + source.randint(5, 30)]
            text += [token if source.random() < 0.95 else source.randrange(400) for token in passage]
        else:
            text += words[int(150 * source.random() ** 2)]
    return text[:num_tokens]


@pytest.mark.parametrize("limit", [4, 8])
def test_it_accepts_more_than_prompt_lookup(limit):
    texts = [ordinary_text(seed) for seed in range(4)]
    ours, theirs = (
        [mean_accepted_length(make(), text, 100, limit) for text in texts] for make in (SuffixDrafter, NgramDrafter)
    )
    assert all(mine >= other for mine, other in zip(ours, theirs, strict=True)), (ours, theirs)
    assert sum(ours) > 1.05 * sum(theirs)


def test_a_second_like_request_is_drafted_better():
    text, found = ordinary_text(9), drafter()
    first = mean_accepted_length(found, text, 20, 8)
    assert mean_accepted_length(found, text, 20, 8) > 2 * first


# -- with a model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trees", [True, False])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 5, "temperature": 0.7}], ids=["greedy", "seeded"])
def test_the_text_is_the_target_s(params, trees):
    model = HuggingFaceLM(tiny_model(tie_word_embeddings=True), self_check=False)  # tied: it repeats itself
    plain = engine(model)
    fast = engine(model, parse({"method": "suffix", "suffix_decoding_trees": trees}).build, k=6)
    prompts = [[5, 6, 7, 8] * 3, [3, 1, 3, 1, 3], list(range(20))]
    wanted = [run(plain, prompt, SamplingParams(max_tokens=40, **params)) for prompt in prompts]
    requests = [fast.add(prompt, SamplingParams(max_tokens=40, **params), reference=prompt)[0] for prompt in prompts]
    drain(fast)
    assert [tuple(r.output) for r in requests] == wanted
    assert sum(sum(r.stats.per_step_accepted) for r in requests) > 0
    assert fast.num_failed_drafts == 0


def test_answers_shared_among_requests_change_no_text():
    target = TableModel(12, num_phases=2, seed=8, sharpness=3)
    found = engine(target, parse({"method": "suffix"}).build, k=8)
    params = SamplingParams(max_tokens=30, seed=11)
    texts = [run(found, [1, 2, 3], params) for _ in range(3)]
    assert texts == [oracle(target.logits_of, [1, 2, 3], params)] * 3
    assert len(found.drafter.answers) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tree_depth", 0),
        ("max_tree_depth", 1000),
        ("max_tree_depth", 2.5),
        ("max_spec_factor", 0),
        ("max_spec_factor", "4"),
        ("min_token_prob", 1.5),
        ("max_cached_requests", -1),
        ("max_cached_tokens", True),
    ],
)
def test_options_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(OptionError, match=f"suffix_decoding_{name}.*{value}"):
        drafter(**{name: value})

"""A draft model with another vocabulary: text tokenised anew, which scheme is used, and what is refused."""

import pytest
import torch

from pilotfish.decoding.sampling import SamplingParams
from pilotfish.drafters import registry
from pilotfish.drafters.wording import SameText, SharedTokens
from pilotfish.engine.options import EngineOptions
from pilotfish.errors import DraftError, OptionError
from pilotfish.inspection import attempt
from pilotfish.models.load import Loaded
from tests.drafters.two_vocabularies import (
    DRAFT,
    DRAFT_TOKENS,
    PROMPT,
    TARGET,
    TARGET_TOKENS,
    config,
    drafting,
    expected,
    tokenizer_of,
    watch,
)
from tests.fakes import ByteTokenizer, SourcedTable, TableModel, drain, engine
from tests.models.test_spelling import words

# -- text -----------------------------------------------------------------------------------------------------------


def writer(next_of: dict[str, str]) -> TableModel:
    """A draft that writes what follows what, by its own tokens."""
    model = TableModel(11, order=1, eos={3}, name="writer")
    model.table = torch.zeros_like(model.table)
    for before, after in next_of.items():
        model.table[0, DRAFT_TOKENS.vocabulary[before], DRAFT_TOKENS.vocabulary[after]] = 5.0
    return model


@pytest.mark.parametrize(
    ("next_of", "drafted"),
    [
        ({"Ġa": "b", "b": "Ġa"}, ["b", "Ġ", "ab"]),
        ({"Ġa": "bb", "bb": "a", "a": "bb"}, ["b", "b", "ab"]),
        ({"Ġa": "Ã", "Ã": "©", "©": "Ã"}, ["Ã©"]),
        ({"Ġa": "Ã", "Ã": "b", "b": "b"}, []),  # no character: U+FFFD, for which the target has no token
        ({"Ġa": "b", "b": "</s>"}, ["b", "</s>"]),
        ({"Ġa": "</s>"}, ["</s>"]),
    ],
    ids=str,
)
def test_text_is_tokenised_anew(next_of, drafted):
    """Three tokens of the draft, as the target spells them, up to the last whole character."""
    found = drafting(writer(next_of), vocabulary_scheme="text", k=3)
    seen = watch(found)
    found.add(PROMPT, SamplingParams(max_tokens=8))
    found.step()
    names = {token: name for name, token in TARGET_TOKENS.vocabulary.items()}
    (_, draft), *_ = seen
    assert [names[token] for token in draft.tokens] == drafted and draft.probs is None


def test_special_tokens_are_never_written():
    model = writer({})
    model.table[..., DRAFT_TOKENS.vocabulary["<s>"]] = 9.0
    found = drafting(model, vocabulary_scheme="text")
    assert isinstance(found.drafter.wording, SameText)
    assert DRAFT_TOKENS.vocabulary["<s>"] not in found.drafter.wording.rows
    params = SamplingParams(temperature=0, max_tokens=10)
    request = found.add(PROMPT, params)[0]
    drain(found)
    assert tuple(request.output) == expected(PROMPT, params) and found.num_failed_drafts == 0


# -- which scheme, and refusals -------------------------------------------------------------------------------------


def test_text_is_drafted_where_little_is_shared():
    few = tokenizer_of(["<s>", "</s>", "l", "o", "Ġ"], [])
    pair = {"target": TableModel(257, order=1), "target_tokens": ByteTokenizer(257)}
    found = drafting(TableModel(5, order=1, name="few"), few, **pair)
    assert isinstance(found.drafter.wording, SameText)
    assert found.drafter.describe() == "few, another vocabulary, 3 of 257 tokens shared, scheme text"
    forced = drafting(TableModel(5, order=1), few, vocabulary_scheme="intersection", **pair)
    assert isinstance(forced.drafter.wording, SharedTokens)


def test_words_can_be_drafted_by_letters():
    """Nothing is shared, yet the text can be said in the target's words; that is refused unless it is asked for."""
    options = {"target": TableModel(4, name="words"), "target_tokens": words()}
    with pytest.raises(DraftError, match="no token in common; choose another draft model, or vocabulary_scheme 'text'"):
        drafting(TableModel(257, order=1), ByteTokenizer(257), **options)
    found = drafting(TableModel(257, order=1), ByteTokenizer(257), vocabulary_scheme="text", **options)
    assert found.drafter.wording.in_target_tokens(list(b" the fish the")) == [1, 2, 1]
    params = SamplingParams(temperature=0, max_tokens=8)
    request = found.add([1, 2], params)[0]
    drain(found)
    assert found.num_failed_drafts == 0
    assert tuple(request.output) == expected([1, 2], params, options["target"])


def test_the_same_vocabulary_needs_no_scheme():
    padded = tokenizer_of(["<s>", "</s>", "a", "b", "Ġ", "Ã", "©"], ["a b", "Ġ a", "Ã ©"])
    padded.hf.add_tokens(["[PAD7]"], special_tokens=True)
    found = drafting(TableModel(16, seed=5, name="same"), padded)
    assert found.drafter.describe() == "same"


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"vocabulary_scheme": "words"}, OptionError, "must be 'auto', 'intersection' or 'text', not 'words'"),
        ({"tokens": ByteTokenizer(17, first_byte=128)}, DraftError, "than target, and the two have no token in common"),
        (
            {"tokens": None, "vocabulary_scheme": "text"},
            DraftError,
            "'text' compares two .* draft came without a token",
        ),
        ({"target_tokens": None, "vocabulary_scheme": "intersection"}, DraftError, "target came without a tokenizer"),
    ],
)
def test_pairs_that_cannot_work_are_refused_with_the_reason(changes, error, says):
    with pytest.raises(error, match=says):
        drafting(**changes)


def test_encoder_decoders_need_one_vocabulary():
    target, draft = SourcedTable(10, name="target"), SourcedTable(11, name="draft")
    with pytest.raises(DraftError, match="has another vocabulary than target, which is read for decoder-only models"):
        drafting(draft, target=target)


def test_a_list_of_tokens_is_kept_to():
    few = registry.parse(config(draft_vocab_size=5)).build
    found = engine(TARGET, few, tokenizer=TARGET_TOKENS)
    assert set(found.drafter.wording.own) == {1, 2, 3, 4}, "of the lowest five, and the end, those that both have"
    assert "7 of 10 tokens shared, 4 of them drafted, scheme intersection" in found.drafter.describe()
    with pytest.raises(DraftError, match="drafts text, so a list or number of the target's tokens has no meaning"):
        engine(
            TARGET, registry.parse(config(draft_vocab_size=5, vocabulary_scheme="text")).build, tokenizer=TARGET_TOKENS
        )


def test_staged_refuses_such_a_draft_model_and_takes_it_inside():
    with pytest.raises(DraftError, match="in the target's; use method 'draft_model', or a draft of the same family"):
        engine(TARGET, registry.parse({**config(), "method": "staged"}).build, tokenizer=TARGET_TOKENS)
    outer = TableModel(10, order=1, seed=3, eos={1}, name="outer")
    params = [SamplingParams(seed=4, max_tokens=30, ignore_eos=True), SamplingParams(temperature=0, max_tokens=30)]
    texts = []
    for whole in ({"method": "draft_model"}, {"method": "staged", "inner": config()}):
        build = registry.parse({**whole, "model": Loaded(outer, TARGET_TOKENS)}).build
        found = engine(TARGET, build, k=5, tokenizer=TARGET_TOKENS)
        requests = [found.add(PROMPT, one)[0] for one in params]
        drain(found)
        assert found.num_failed_drafts == 0
        texts.append([(tuple(r.output), r.stats.per_step_drafted, r.stats.per_step_accepted) for r in requests])
    assert texts[0] == texts[1]
    assert [text for text, *_ in texts[0]] == [expected(PROMPT, one) for one in params]


def test_among_others_it_drafts_where_they_are_silent():
    build = registry.parse({"method": "first_of", "drafters": ["ngram", config()]}).build
    found = engine(TARGET, build, k=4, tokenizer=TARGET_TOKENS)
    params = SamplingParams(seed=4, max_tokens=40, ignore_eos=True)
    request = found.add(PROMPT, params)[0]
    before = DRAFT.num_passes
    drain(found)
    assert tuple(request.output) == expected(PROMPT, params)
    assert found.num_failed_drafts == 0 and DRAFT.num_passes > before


def test_inspect_says_what_is_shared():
    loaded = Loaded(TARGET, TARGET_TOKENS)
    options = {"model": Loaded(DRAFT, DRAFT_TOKENS)}
    assert attempt("draft_model", loaded, EngineOptions(), 64, options) == (
        None,
        "draft, another vocabulary, 7 of 10 tokens shared, scheme intersection",
    )
    reason, about = attempt("staged", loaded, EngineOptions(), 64, options)
    assert reason is not None and "has another vocabulary than target" in reason and about == ""

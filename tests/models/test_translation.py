"""Two vocabularies: what they share, and a text that grows, read in the other's tokens."""

import random

import pytest

from pilotfish.models.tokenizer import Tokenizer, mismatch
from pilotfish.models.translation import BLOCK, MARGIN, Translator, following, shared, spelling_out
from tests.models.test_spelling import words
from tests.models.test_tokenizer import byte_fallback, byte_level, metaspace, word_piece

NONE: frozenset[int] = frozenset()
TEXT = (
    "the pilot fish, naïve café 東京 🐟 swims ahead of the shark.\n\n    for x in y: 12345\n"
    + "x" * 700
    + " the end of it"
)
LONG = " ".join([TEXT, "the fish " * 90, TEXT])


def named(tokenizer: Tokenizer, ids) -> set[str]:
    names = {token: name for name, token in tokenizer.vocabulary.items()}
    return {names[token] for token in ids}


def translator(draft: Tokenizer, target: Tokenizer) -> Translator:
    return Translator(draft, target, shared(draft, target, NONE, NONE).specials, 10**6)


def spelt(tokenizer: Tokenizer, ids) -> bytes:
    return b"".join(tokenizer.token_bytes.get(token, b"") for token in ids)


# -- what is shared -------------------------------------------------------------------------------------------------


def test_tokens_are_shared_by_what_they_stand_for():
    target, draft = byte_level(), byte_fallback()
    common = shared(draft, target, NONE, NONE)
    names = dict(zip(named_in_order(target, common.target_ids), named_in_order(draft, common.draft_ids), strict=True))
    assert len(names) == len(common) == len(set(common.draft_ids)) == 256 + 2
    assert names["Ġthe"] == "▁the" and names["Ã©"] == "é" and names["Ġ"] == "▁" and names["Ċ"] == "\n"
    assert names["a"] == "a", "a byte token stands for a byte only where no other does"
    assert names["b"] == "<0x62>" and names["Ã"] == "<0xC3>"
    assert not {"the", "th", "ðŁ"} & set(names), "the draft has none that stands for these"
    assert list(common.target_ids) == sorted(common.target_ids)
    back = shared(target, draft, NONE, NONE)
    assert dict(zip(back.draft_ids, back.target_ids, strict=True)) == dict(
        zip(common.target_ids, common.draft_ids, strict=True)
    )


def named_in_order(tokenizer: Tokenizer, ids) -> list[str]:
    names = {token: name for name, token in tokenizer.vocabulary.items()}
    return [names[token] for token in ids]


def test_special_tokens_are_never_shared_but_for_the_end_of_text():
    target, draft = byte_level(), byte_fallback()
    ids = {name: (target.vocabulary[name], draft.vocabulary[name]) for name in ("<s>", "</s>")}
    without = shared(draft, target, NONE, NONE)
    assert not without.ends and not set(without.target_ids) & {ids["<s>"][0], ids["</s>"][0]}
    assert without.specials == dict(ids.values()), "they are read by name"
    (end, own) = ids["</s>"]
    both = shared(draft, target, frozenset({own}), frozenset({end}))
    assert both.ends == {end: own} and len(both) == len(without) + 1
    assert dict(zip(both.target_ids, both.draft_ids, strict=True))[end] == own
    one_sided = shared(draft, target, NONE, frozenset({end}))
    assert not one_sided.ends and end not in one_sided.target_ids


def test_ends_of_other_names_end_both():
    target, draft = word_piece(), byte_level()
    end, own = target.vocabulary["[SEP]"], draft.vocabulary["</s>"]
    common = shared(draft, target, frozenset({own}), frozenset({end}))
    assert common.ends == {end: own} and common.specials[end] == own


def test_what_ends_a_text_is_not_shared_as_text():
    target, draft = byte_level(), byte_level(["fish"])
    a = target.vocabulary["a"]
    assert a in shared(draft, target, NONE, NONE).target_ids
    assert a not in shared(draft, target, NONE, frozenset({a})).target_ids
    assert a not in shared(draft, target, frozenset({a}), NONE).target_ids


def test_coverage_is_of_text_not_of_the_table():
    assert shared(byte_level(), byte_level(["fish"]), NONE, NONE).coverage == 1
    rare = byte_level([f"zq{i}" for i in range(1000)])
    assert shared(byte_level(), rare, NONE, NONE).coverage == 1
    assert shared(words(), byte_level(), NONE, NONE).coverage < 0.5


def test_free_ids_may_be_called_anything():
    names = ["<unused0>", "<unused1>", "fish"]
    plain, other = byte_level(names), byte_level(["<unused1>", "<|reserved_7|>", "fish"])
    assert mismatch(other, plain) is None
    used = mismatch(byte_level(["<unused1>", "whale", "fish"]), plain)
    assert used is not None and "is '<unused1>' in the target and 'whale' in the draft" in used


# -- the same text in other tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "draft"), [(byte_level, byte_fallback), (byte_fallback, byte_level)])
def test_a_text_that_grows_is_read_as_at_once_and_what_is_fixed_stays(target, draft):
    target, draft = target(), draft()
    tokens = target.encode(LONG, add_special_tokens=False)
    found, steps, fixed, num_silent = translator(draft, target), random.Random(1), [], 0
    length = 0
    while length < len(tokens):
        length = min(len(tokens), length + steps.randint(1, 9))
        read = found.read("growing", tokens[:length], length)
        assert read == translator(draft, target).read("at once", tokens[:length], length)
        data = spelt(target, tokens[:length]).removeprefix(b" " * target.leads)
        whole = data.decode(errors="ignore").encode() == data
        assert (read is not None) == whole
        if read is None:
            num_silent += 1
            continue
        ids, num_fixed = read
        assert spelt(draft, ids) == b" " * draft.leads + data
        assert ids[: len(fixed)] == fixed and num_fixed >= len(fixed)
        fixed = ids[:num_fixed]
        assert len(spelt(draft, ids[num_fixed:])) <= 4 * (2 * BLOCK + MARGIN)
    assert num_silent > 0 and len(fixed) > len(ids) / 2


def test_of_guessed_tokens_nothing_is_remembered():
    target, draft = byte_level(), byte_fallback()
    tokens = target.encode(LONG, add_special_tokens=False)
    found = translator(draft, target)
    for length in range(0, len(tokens) - 400, 97):
        guessed = [*tokens[: length + 1], *reversed(tokens)]
        read = found.read("it", guessed, length + 1)
        assert read is None or read[1] < len(read[0])
        kept = found.read("it", tokens[: length + 1], length + 1)
        assert kept == translator(draft, target).read("fresh", tokens[: length + 1], length + 1)
        assert read is None or kept is None or read[1] == kept[1]
    found.release("it")
    assert not found._places


def test_no_special_tokens_are_added_and_those_of_the_text_are_read_by_name():
    target, draft = byte_level(), byte_fallback()
    start, end = target.vocabulary["<s>"], target.vocabulary["</s>"]
    text = target.encode("the", add_special_tokens=False)
    found = translator(draft, target)
    ids, _ = found.read("plain", text, len(text))
    assert not named(draft, ids) & {"<s>", "</s>"}
    marked = [start, *text, end, *text]
    ids, num_fixed = found.read("marked", marked, len(marked))
    assert named_in_order(draft, ids)[0] == "<s>" and named_in_order(draft, ids).count("</s>") == 1
    assert num_fixed == named_in_order(draft, ids).index("</s>") + 1
    assert found.read("end", marked[: -len(text)], len(marked) - len(text))[1] == num_fixed - 1, (
        "the last is always fed"
    )
    assert translator(metaspace(), target).read("only one", [start], 1) is None, "nothing that it can read"


def test_a_broken_character_before_a_special_token_is_closed():
    target, draft = byte_level(), byte_fallback()
    half = [target.vocabulary["Ã"]]
    found = translator(draft, target)
    assert found.read("half", half, 1) is None
    ids, _ = found.read("half", [*half, target.vocabulary["</s>"]], 2)
    assert spelt(draft, ids) == " \ufffd".encode()


def test_tokens_beyond_the_draft_s_table_are_left_out():
    target, draft = byte_fallback(), byte_level()
    text, highest = target.encode("a the", add_special_tokens=False), draft.vocabulary["Ġthe"]
    ids, _ = Translator(draft, target, {}, highest + 1).read("it", text, len(text))
    assert ids == [draft.vocabulary["a"], highest]
    assert Translator(draft, target, {}, highest).read("it", text, len(text)) == ([draft.vocabulary["a"]], 0)


@pytest.mark.parametrize("text", [" the fish", "fish", "ing", "\n", "é🐟", "  two"])
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_a_text_that_goes_on_gets_no_space_of_its_own(make, text):
    tokenizer = make()
    assert spelt(tokenizer, following(tokenizer, text)) == text.encode()
    assert spelling_out(tokenizer, text) == following(tokenizer, text)


def test_only_what_stands_for_just_this_text_is_spelt_out():
    """Where a tokenizer has no word for something, or cannot go on without a space, that ends it."""
    tokenizer = words()
    assert named_in_order(tokenizer, spelling_out(tokenizer, " the fish")) == ["the", "fish"]
    assert named_in_order(tokenizer, spelling_out(tokenizer, " the shark the")) == ["the"]
    assert spelling_out(tokenizer, "the fish") == []

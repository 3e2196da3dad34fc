"""A draft model with another vocabulary: what it reads, what q it carries, and that the text stays the target's.

Two byte-level tokenizers of a handful of tokens, with other ids, other merges and characters split in other places;
their models are tables, so every law is known.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import tokenizers
import torch
from scipy.stats import chisquare
from tokenizers import decoders, models, pre_tokenizers

from pilotfish.decoding.draft import EMPTY, chain
from pilotfish.decoding.sampling import SamplingParams, warp
from pilotfish.drafters import registry
from pilotfish.drafters.wording import SameText, SharedTokens
from pilotfish.engine.options import EngineOptions
from pilotfish.errors import DraftError, OptionError
from pilotfish.inspection import attempt
from pilotfish.models.load import Loaded
from pilotfish.models.tokenizer import Tokenizer
from tests.adversaries import Scripted
from tests.fakes import ByteTokenizer, SourcedTable, TableModel, drain, engine, oracle
from tests.models.test_spelling import words
from tests.models.test_tokenizer import wrapped

MODES = [
    {"temperature": 0},
    {"seed": 1},
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"seed": 2, "repetition_penalty": 1.3, "min_tokens": 9},
]


def tokenizer_of(names: Sequence[str], merges: Sequence[str]) -> Tokenizer:
    """Byte-level. A merge is written with a blank between its parts."""
    parts = [tuple(merge.split()) for merge in merges]
    names = [*names, *("".join(pair) for pair in parts)]
    backend = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, parts))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return wrapped(backend, bos_token="<s>", eos_token="</s>")


TARGET_TOKENS = tokenizer_of(["<s>", "</s>", "a", "b", "Ġ", "Ã", "©"], ["a b", "Ġ a", "Ã ©"])
DRAFT_TOKENS = tokenizer_of(["Ġ", "©", "b", "</s>", "a", "Ã", "<s>"], ["b a", "Ġ a", "Ġ b", "b b"])
TARGET = TableModel(10, order=2, num_phases=3, eos={1}, name="target", sharpness=1.2)
DRAFT = TableModel(11, order=1, num_phases=2, seed=12, eos={3}, name="draft", sharpness=1.2)
OWN = {1: 3, 2: 4, 3: 2, 4: 0, 5: 5, 6: 1, 8: 8}  # the target's ids of what both have, and the draft's
PROMPT = [2, 3, 7, 4, 2]  # abab a


def config(model=DRAFT, tokens=DRAFT_TOKENS, **options):
    return {"method": "draft_model", "model": Loaded(model, tokens), **options}


def drafting(model=DRAFT, tokens=DRAFT_TOKENS, *, target=TARGET, target_tokens=TARGET_TOKENS, k=4, **options):
    own = {key: options.pop(key) for key in ("draft_sample_method", "vocabulary_scheme") if key in options}
    return engine(target, registry.parse(config(model, tokens, **own)).build, k=k, tokenizer=target_tokens, **options)


def expected(prompt, params, target=TARGET):
    return oracle(target.logits_of, prompt, params, eos=target.info.eos_ids)


def watch(found):
    """From now on, what is drafted, with the text it was drafted for."""
    seen = []
    ask = found.drafter.propose

    def propose(requests, limits):
        drafts = ask(requests, limits)
        seen.extend((list(r.tokens), draft) for r, draft in zip(requests, drafts, strict=True))
        return drafts

    found.drafter.propose = propose
    return seen


def read(text: Sequence[int]) -> list[int] | None:
    """The text in the draft's tokens, by itself; None if it ends inside a character."""
    data = b"".join(TARGET_TOKENS.token_bytes[token] for token in text)
    if data.endswith(b"\xc3"):
        return None
    return DRAFT_TOKENS.encode(data.decode(errors="replace"), add_special_tokens=False)


# -- shared tokens --------------------------------------------------------------------------------------------------


def test_which_tokens_are_drafted():
    found = drafting()
    assert isinstance(found.drafter.wording, SharedTokens) and found.drafter.wording.own == OWN
    assert found.drafter.describe() == "draft, another vocabulary: drafts the 7 of 10 tokens that both have"


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("scheme", ["intersection", "text"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_text_is_the_target_s(mode, scheme, rule):
    found = drafting(vocabulary_scheme=scheme, rule=rule)
    seen = watch(found)
    params = [SamplingParams(**mode, max_tokens=40, ignore_eos=i % 2 == 0) for i in range(6)]
    requests = [found.add([*PROMPT, *[2] * i], one)[0] for i, one in enumerate(params)]
    drain(found)
    assert found.num_failed_drafts == 0
    assert sum(sum(request.stats.per_step_drafted) for request in requests) > 20
    assert scheme == "text" or sum(sum(request.stats.per_step_accepted) for request in requests) > 5
    for request, one in zip(requests, params, strict=True):
        if one.greedy or one.seed:
            assert tuple(request.output) == expected(request.prompt, one)
    assert 0 not in {token for _, draft in seen for token in draft.tokens}, "a special token was drafted"
    for _, draft in seen:
        assert 1 not in draft.tokens[:-1] or params[0].ignore_eos
        if scheme == "intersection":
            assert set(draft.tokens) <= set(OWN)
        else:
            assert draft.probs is None
    assert not found.drafter.cache.sequences and not found.drafter._scratch
    assert not found.drafter.wording.translator._places


@pytest.mark.parametrize("scheme", ["intersection", "text"])
def test_state_survives_preemption_chunked_prompts_and_small_caches(scheme):
    found = drafting(vocabulary_scheme=scheme, num_pages=12, max_num_batched_tokens=7, max_num_seqs=4)
    params = SamplingParams(seed=9, max_tokens=20, ignore_eos=True)
    requests = [found.add((PROMPT * 3)[: 3 + 2 * i], params)[0] for i in range(5)]
    drain(found)
    assert found.scheduler.num_preemptions > 0 and found.num_failed_drafts == 0
    assert [tuple(r.output) for r in requests] == [expected(r.prompt, params) for r in requests]
    assert sum(sum(r.stats.per_step_drafted) for r in requests) > 0


def law_of_draft(text: Sequence[int], own: Sequence[int], params: SamplingParams, output: Sequence[int]):
    """By hand: the draft's logits at what is shared, scattered to the target's ids, as `warp` makes a law of them."""
    logits_V = torch.full((10,), -torch.inf, dtype=torch.float64)
    row_V = DRAFT.logits_of(own)
    for token, mine in OWN.items():
        logits_V[token] = row_V[mine]
    return warp(logits_V[None], params, PROMPT, [output], TARGET.info.eos_ids)[0]


@pytest.mark.parametrize("mode", [{}, {"temperature": 0.7, "top_p": 0.9}, {"frequency_penalty": 0.8}], ids=str)
def test_q_is_the_draft_s_law_of_what_is_shared(mode):
    """After the text in the draft's own tokens, and its guesses in its own tokens."""
    found = drafting()
    seen = watch(found)
    without = {0: -float("inf"), 1: -float("inf")}  # `read` knows no special tokens
    params = SamplingParams(**mode, max_tokens=60, ignore_eos=True, logit_bias=without)
    for _ in range(3):
        found.add(PROMPT, params)
    drain(found)
    num_silent = num_checked = 0
    for text, draft in seen:
        own = read(text)
        assert (len(draft) == 0) == (own is None)
        num_silent += own is None
        for node, token in enumerate(draft.tokens):
            law_V = law_of_draft(own, own, params, [*text[len(PROMPT) :], *draft.tokens[:node]])
            assert torch.allclose(draft.probs[node], law_V, atol=1e-12)
            own = [*own, OWN[token]]
            num_checked += 1
    assert num_checked > 100 and num_silent > 0


def drafted_tokens(num_runs: int):
    """What is drafted first after PROMPT, and the law that was carried with it."""
    sizes = {"max_num_seqs": num_runs, "num_pages": 4 * num_runs, "max_num_batched_tokens": 20_000}
    found = drafting(k=1, **sizes, entropy=itertools.count().__next__)
    seen = watch(found)
    for _ in range(num_runs):
        found.add(PROMPT, SamplingParams(max_tokens=2))
    found.step()
    return [draft.tokens[0] for _, draft in seen if len(draft)], seen[0][1].probs[0]


def test_what_is_drawn_follows_the_q_that_is_carried():
    tokens, q_V = drafted_tokens(1500)
    assert len(tokens) == 1500
    counts, shared = Counter(tokens), [token for token in range(10) if q_V[token] > 0]
    assert set(counts) <= set(shared) == set(OWN)
    assert chisquare([counts[t] for t in shared], [1500 * float(q_V[t]) for t in shared]).pvalue > 1e-3
    whole_V = torch.softmax(DRAFT.logits_of(read(PROMPT)), 0)
    wrong_V = whole_V[shared] / whole_V[shared].sum()  # the control: ids of the target looked up in the draft's law
    assert chisquare([counts[t] for t in shared], (1500 * wrong_V).tolist()).pvalue < 1e-6


def p_value(change=lambda draft: draft, **options) -> float:
    """Of the hypothesis that the first token after PROMPT follows the target's law."""
    num_runs = 1000
    speculation = registry.parse(config(**options))

    def build(setting):
        inner = speculation.build(setting)
        found = Scripted(lambda *asked: EMPTY)
        found.propose = lambda requests, limits: [change(draft) for draft in inner.propose(requests, limits)]
        found.release = inner.release
        return found

    found = engine(
        TARGET,
        build,
        k=2,
        tokenizer=TARGET_TOKENS,
        entropy=itertools.count().__next__,
        max_num_seqs=250,
        num_pages=1500,
    )
    requests = [found.add(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))[0] for _ in range(num_runs)]
    while found.has_work:
        found.step()
    assert found.num_failed_drafts == 0
    counts = Counter(request.output[0] for request in requests)
    law_V = TARGET.law(PROMPT)
    return float(chisquare([counts[t] for t in range(10)], [num_runs * float(p) for p in law_V]).pvalue)


def test_unseeded_tokens_follow_the_target_s_law_and_a_q_that_is_not_renormalised_is_found_out():
    assert p_value() > 1e-3
    assert p_value(vocabulary_scheme="text") > 1e-3
    whole_V = torch.softmax(DRAFT.logits_of(read(PROMPT)), 0)
    kept = float(sum(whole_V[own] for own in OWN.values()))
    assert kept < 0.8, "the control would control nothing"

    def unnormalised(draft):
        return chain(draft.tokens, draft.probs * kept) if draft.probs is not None else draft

    assert p_value(unnormalised) < 1e-6


# -- what it reads --------------------------------------------------------------------------------------------------

LETTERS = "etaoinshrdlucmfw gypbvk"


def letters(order: Sequence[int]) -> Tokenizer:
    names = [character.replace(" ", "Ġ") for character in LETTERS]
    return tokenizer_of([*(names[i] for i in order), "<s>", "</s>"], [])


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_twin_with_other_ids_is_always_right_and_reads_nothing_twice(mode):
    """The target under a permutation of its ids: reading, catching up and mapping are all exact, over cuts too."""
    size = len(LETTERS)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(3)).tolist()  # own id -> the target's
    target = TableModel(size, order=1, num_phases=1, context=1500, name="twin")
    draft = TableModel(size, order=1, num_phases=1, context=1500)
    draft.table = target.table[:, order][:, :, order]
    params = SamplingParams(**mode, max_tokens=30)
    prompt = [(5 * i + i // 7) % size for i in range(700)]
    found = drafting(
        draft,
        letters(order),
        target=target,
        target_tokens=letters(range(size)),
        block_size=16,
        max_num_seqs=2,
        num_pages=100,
        max_model_len=1000,
    )
    request = found.add(prompt, params)[0]
    drain(found)
    if not params.penalised:  # the fake's table knows nothing of penalties, both laws do
        assert request.stats.per_step_accepted == request.stats.per_step_drafted
    assert sum(request.stats.per_step_drafted) > 20
    if params.greedy or params.seed:
        assert tuple(request.output) == expected(prompt, params, target)
    assert draft.num_rows <= len(prompt) + 2 * 30, "what was read was read again"


def test_what_is_fixed_is_shared_between_requests():
    size = len(LETTERS)
    target, draft = (TableModel(size, order=1, context=1500, seed=seed) for seed in (0, 1))
    tokens, prompt = letters(range(size)), [(5 * i + i // 7) % size for i in range(700)]
    rows = []
    found = drafting(draft, letters(range(size - 1, -1, -1)), target=target, target_tokens=tokens, max_num_seqs=2)
    for _ in range(2):
        before = draft.num_rows
        found.add(prompt, SamplingParams(temperature=0, max_tokens=3))
        drain(found)
        rows.append(draft.num_rows - before)
    assert rows[0] > 700 > 500 > rows[1]


def test_inside_a_character_nothing_is_drafted():
    found = drafting()
    seen = watch(found)
    bias = {token: -float("inf") for token in (0, 1, 9)}
    found.add([2, 5], SamplingParams(temperature=0, max_tokens=1, logit_bias={**bias, 6: 100.0}))
    found.add([2, 5, 6], SamplingParams(temperature=0, max_tokens=3, logit_bias=bias))
    drain(found)
    drafts = {tuple(text): len(draft) for text, draft in seen}
    assert drafts.get((2, 5), 0) == 0 and drafts[2, 5, 6] > 0


def test_a_text_longer_than_the_draft_s_context_is_not_drafted():
    """In its own tokens: the fake fails an assertion if a row beyond its context is fed."""
    short = replace(DRAFT.info, context=12)
    draft = TableModel(11, order=1, num_phases=2, seed=12, eos={3})
    draft.info = short
    found = drafting(draft)
    params = SamplingParams(seed=3, max_tokens=30, ignore_eos=True)
    request = found.add(PROMPT, params)[0]
    drain(found)
    assert found.num_failed_drafts == 0 and tuple(request.output) == expected(PROMPT, params)
    assert 0 < sum(request.stats.per_step_drafted) < 30


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
    assert (
        found.drafter.describe() == "few, another vocabulary, 3 of 257 tokens in both: drafts its text, tokenised anew"
    )
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
        "draft, another vocabulary: drafts the 7 of 10 tokens that both have",
    )
    reason, about = attempt("staged", loaded, EngineOptions(), 64, options)
    assert reason is not None and "has another vocabulary than target" in reason and about == ""

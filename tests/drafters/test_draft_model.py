"""A draft model runs ahead, with a cache of its own: what it reads and keeps, and where it is silent."""

from dataclasses import replace

import pytest
import torch

from pilotfish.decoding.draft import Draft
from pilotfish.decoding.request import Request
from pilotfish.decoding.sampling import SamplingParams, warp
from pilotfish.drafters import registry
from pilotfish.drafters.draft_model import DraftModelDrafter, DraftModelOptions
from pilotfish.errors import DraftError, ModelError, OptionError
from pilotfish.llm import LLM
from pilotfish.models import vocabulary
from pilotfish.models.load import Loaded
from tests.fakes import ByteTokenizer, TableModel, drain, engine, oracle, run
from tests.models.tiny import tiny_model

TARGET = TableModel(16, order=2, num_phases=3)
PROMPT = [3, 1, 4]
MODES = [
    {"temperature": 0},
    {"seed": 1},
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"seed": 2, "repetition_penalty": 1.3},
]


def drafting(model, target=TARGET, *, tokenizers=(None, None), k=4, rule="rejection", page_size=4, **options):
    """An engine whose drafter is this model. Keyword arguments that the engine does not know go to the drafter."""
    own = {key: options.pop(key) for key in ("draft_sample_method", "max_model_len") if key in options}
    speculation = registry.parse({"method": "draft_model", "model": Loaded(model, tokenizers[1]), **own})
    return engine(target, speculation.build, k=k, rule=rule, tokenizer=tokenizers[0], block_size=page_size, **options)


def expected(prompt, params, model=TARGET):
    return oracle(model.logits_of, prompt, params)


def watch(found) -> list[tuple[list[int], Draft]]:
    """From now on, what is drafted, with the text it was drafted for."""
    seen: list[tuple[list[int], Draft]] = []
    ask = found.drafter.propose

    def propose(requests, limits):
        drafts = ask(requests, limits)
        seen.extend((list(r.tokens), draft) for r, draft in zip(requests, drafts, strict=True))
        return drafts

    found.drafter.propose = propose
    return seen


def drafted(request: Request) -> int:
    return sum(request.stats.per_step_drafted)


# -- the target as its own draft ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_draft_model_that_is_the_target_is_always_right(mode, k, rule):
    """Catch-up after a full acceptance: the last drafted token was never fed, and is missing in the draft's cache."""
    twin = TableModel(16, order=2, num_phases=3)
    found = drafting(twin, k=k, rule=rule)
    params = SamplingParams(**mode, max_tokens=20)
    requests = [found.add([*PROMPT, i], params)[0] for i in range(3)]
    drain(found)
    for request in requests:
        assert request.stats.per_step_accepted == request.stats.per_step_drafted
        assert request.stats.num_steps == -(-20 // (k + 1))
        if params.greedy or params.seed:
            assert tuple(request.output) == expected(request.prompt, params)
    # Each token is read once, however the passes were cut; the last guess and what follows it, never.
    assert twin.num_rows == sum(len(r.tokens) - 2 for r in requests)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_so_is_a_real_one(kind):
    target = LLM.from_model(tiny_model(kind), assistant_model=tiny_model(kind), num_assistant_tokens=4)
    for params in (SamplingParams(temperature=0, max_tokens=15), SamplingParams(max_tokens=15)):
        (done,) = target.generate([[1, 2, 3]], params)
        assert done.speculative_decoding["draft_acceptance_rate"] == 1


def test_after_a_rejection_it_reads_the_target_s_token():
    """What it drafts is what its own table says after the text so far, whatever became of its last guesses; and no row
    is computed twice but one: that of a rejected guess, with the target's token."""
    draft = TableModel(16, order=2, num_phases=3)
    draft.table = TARGET.table + 1.2 * torch.randn(TARGET.table.shape, generator=torch.Generator().manual_seed(1))
    found = drafting(draft, k=4)
    seen = watch(found)
    (request,) = found.add(PROMPT, params := SamplingParams(temperature=0, max_tokens=40))
    drain(found)
    assert tuple(request.output) == expected(PROMPT, params)
    assert {0, 4} < set(request.stats.per_step_accepted), "neither extreme was met"
    num_rows = num_read = 0
    for (text, guesses), accepted in zip(seen, request.stats.per_step_accepted, strict=True):
        assert guesses.tokens == expected(text, SamplingParams(temperature=0, max_tokens=len(guesses)), draft)
        num_rows += len(text) - num_read + len(guesses) - 1
        num_read = len(text) + min(accepted, len(guesses) - 1)
    assert draft.num_rows == num_rows


def test_after_steps_without_it_it_reads_what_was_said_meanwhile():
    """Its old guesses lie where the new text goes on, and only those that came true may stay."""
    draft = TableModel(16, order=2, num_phases=3)
    draft.table = TARGET.table + 1.2 * torch.randn(TARGET.table.shape, generator=torch.Generator().manual_seed(1))
    found = drafting(draft, k=4)
    seen = watch(found)
    limits = found.scheduler.limits_of
    (request,) = found.add(PROMPT, SamplingParams(temperature=0, max_tokens=60))
    for step in range(60):
        found.scheduler.limits_of = limits if step % 4 == 0 else lambda requests: [0] * len(requests)
        found.step()
    assert request.finish and len(seen) > 8
    for text, guesses in seen:
        assert guesses.tokens == expected(text, SamplingParams(temperature=0, max_tokens=len(guesses)), draft)


def test_prompts_longer_than_a_pass_are_read_in_passes():
    twin = TableModel(16, order=2, num_phases=3)
    found = drafting(twin, max_num_batched_tokens=7, max_num_seqs=3)
    prompts = [[(5 * i + n) % 16 for i in range(n)] for n in (30, 9, 17)]
    params = SamplingParams(temperature=0, max_tokens=12)
    requests = [found.add(prompt, params)[0] for prompt in prompts]
    drain(found)
    for request in requests:
        assert tuple(request.output) == expected(request.prompt, params)
        assert request.stats.per_step_accepted == request.stats.per_step_drafted
        assert drafted(request) > 0


# -- where it is silent ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limited_by", ["the model's context", "max_model_len"])
def test_beyond_its_context_it_stops_drafting_and_nobody_stops_serving(limited_by):
    """The fake fails an assertion if a row beyond its context is fed."""
    twin = TableModel(16, order=2, num_phases=3, context=20 if limited_by == "the model's context" else 256)
    options = {} if limited_by == "the model's context" else {"max_model_len": 20}
    found = drafting(twin, k=6, **options)
    params = SamplingParams(temperature=0, max_tokens=30)
    short, long = (found.add([(3 * i) % 16 for i in range(n)], params)[0] for n in (10, 25))
    drain(found)
    assert found.num_failed_drafts == 0
    assert tuple(short.output) == expected(short.prompt, params)
    assert tuple(long.output) == expected(long.prompt, params)
    assert drafted(long) == 0
    assert 0 < drafted(short) <= 10
    assert short.num_prompt + short.stats.num_steps + drafted(short) >= 20


def test_without_pages_it_is_silent_and_comes_back():
    twin = TableModel(16, order=2, num_phases=3)
    found = drafting(twin, k=4)
    found.drafter.cache = twin.new_cache(5, 4)  # 20 rows for three texts of 6 to 26
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    requests = [found.add([i, 2, i, 4, 5, i], params)[0] for i in range(3)]
    drain(found)
    assert found.num_failed_drafts == 0
    assert [tuple(r.output) for r in requests] == [expected(r.prompt, params) for r in requests]
    assert all(drafted(request) > 0 for request in requests[:2])
    assert found.drafter.cache.pool.num_held == 0
    nothing = drafting(twin, k=4)
    nothing.drafter.cache = twin.new_cache(1, 4)
    (request,) = nothing.add([1, 2, 3, 4, 5], params)
    drain(nothing)
    assert tuple(request.output) == expected(request.prompt, params) and drafted(request) == 0


def test_pages_are_taken_from_requests_that_do_not_draft_now():
    """A request whose sequence was closed is read again later."""
    twin = TableModel(16, order=2, num_phases=3)
    found = drafting(twin, k=2)
    found.drafter.cache = twin.new_cache(6, 4)
    params = SamplingParams(temperature=0, max_tokens=12)
    first, second = (found.add([i] * 8, params)[0] for i in (1, 2))
    for turn in range(40):
        found.scheduler.limits_of = lambda requests, turn=turn: [2 * (int(r.id) % 2 == turn // 3 % 2) for r in requests]
        found.step()
        found.drafter.cache.check()
    assert [tuple(r.output) for r in (first, second)] == [expected(r.prompt, params) for r in (first, second)]
    for request in (first, second):
        assert request.stats.per_step_accepted == request.stats.per_step_drafted
        assert len(request.stats.per_step_drafted) > 1


# -- tables of different sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("num_ids", [12, 16, 19])
def test_a_draft_s_table_may_be_shorter_or_longer(num_ids, mode):
    """Padded tables differ in length. Beyond the target's, ids are never drafted; beyond the draft's, q is 0."""
    draft = TableModel(num_ids, order=1, seed=5)
    draft.table[..., 16:] += 9  # what it would say if it were let
    found = drafting(draft, k=3)
    params = SamplingParams(**mode, max_tokens=25, logit_bias={15: -float("inf")} if num_ids < 16 else None)
    seen = watch(found)
    (request,) = found.add(PROMPT, params)
    drain(found)
    assert found.num_failed_drafts == 0
    drafts = [draft for _, draft in seen]
    tokens = {token for draft in drafts for token in draft.tokens}
    assert tokens and max(tokens) < min(num_ids, 16)
    for law in (draft.probs for draft in drafts if draft.probs is not None):
        assert law.shape[1] == 16
        assert torch.allclose(law.sum(1), torch.ones(len(law), dtype=law.dtype))
    if params.greedy or params.seed:
        assert tuple(request.output) == expected(PROMPT, params)


def test_ids_that_the_draft_cannot_read():
    """A text that holds one is not drafted for; the other requests are."""
    draft = TableModel(8, order=1, seed=5)
    found = drafting(draft, TableModel(16, order=2, num_phases=3))
    tame = {token: -float("inf") for token in range(8, 16)}
    params = SamplingParams(temperature=0, max_tokens=15, logit_bias=tame)
    unreadable, readable = (found.add(prompt, params)[0] for prompt in ([1, 12, 3], [1, 2, 3]))
    wild = SamplingParams(seed=1, max_tokens=15)
    (going_wild,) = found.add([1, 2], wild)
    drain(found)
    assert found.num_failed_drafts == 0
    assert drafted(unreadable) == 0 < drafted(readable)
    assert [tuple(r.output) for r in (unreadable, readable)] == [
        expected(r.prompt, params) for r in (unreadable, readable)
    ]
    assert tuple(going_wild.output) == expected([1, 2], wild)
    at = next(i for i, token in enumerate(going_wild.output) if token >= 8)
    assert 0 < drafted(going_wild) <= 4 * (at + 1)


# -- options and refusals -------------------------------------------------------------------------------------------


def test_greedy_drafts_carry_no_laws():
    found = drafting(TableModel(16, seed=3), draft_sample_method="greedy")
    seen, model = watch(found), found.drafter.model
    found.add(PROMPT, SamplingParams(max_tokens=20))
    drain(found)
    for text, draft in seen:
        assert draft.probs is None
        assert draft.tokens == expected(text, SamplingParams(temperature=0, max_tokens=len(draft)), model)


def test_nothing_is_drafted_after_the_end_of_text():
    model = TableModel(16, order=2, num_phases=3, eos={5})
    found = drafting(TableModel(16, order=2, num_phases=3), model, k=12)
    seen = watch(found)
    for seed in range(8):
        run(found, PROMPT, SamplingParams(seed=seed, max_tokens=40))
    ended = [draft.tokens for _, draft in seen if 5 in draft.tokens]
    assert ended and all(tokens.index(5) == len(tokens) - 1 for tokens in ended)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({}, DraftError, "method 'draft_model' needs a draft model"),
        ({"model": 5}, DraftError, "a draft model is given by name, as a folder or loaded, not as 5"),
        ({"model": "/no/such/folder"}, ModelError, "there is no folder /no/such/folder"),
    ],
)
def test_draft_models_that_are_not_there(options, error, says):
    speculation = registry.parse({"method": "draft_model"} | options)
    with pytest.raises(error, match=says):
        engine(TARGET, speculation.build)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"draft_sample_method": "magic"}, "'probabilistic' or 'greedy', not 'magic'"),
        ({"max_model_len": 0}, "max_model_len must be .*, not 0"),
        ({"draft_sample_metod": "greedy"}, "did you mean 'draft_sample_method'?"),
    ],
)
def test_options_out_of_range(options, says):
    with pytest.raises(OptionError, match=says):
        registry.parse({"method": "draft_model", "model": "x"} | options)


def test_it_says_who_drafts():
    found = drafting(TableModel(16, name="little"))
    assert isinstance(found.drafter, DraftModelDrafter) and found.drafter.describe() == "little"


# -- frequent tokens only -------------------------------------------------------------------------------------------


def listing(tmp_path, ids, info=TARGET.info, tokenizer=None):
    path = tmp_path / "tokens.json"
    vocabulary.count([[token] * (len(ids) - place) for place, token in enumerate(ids)], tokenizer, info).write(path)
    return path


@pytest.mark.parametrize("method", ["draft_model", "staged"])
@pytest.mark.parametrize("mode", [*MODES, {"seed": 3, "presence_penalty": 0.8, "logit_bias": {8: 1.5}}], ids=str)
def test_the_target_with_a_part_of_its_head_is_wrong_only_where_it_cannot_be_right(tmp_path, mode, method):
    """Its argmax and its races (by the target's ids) are the target's own, but for tokens that it has no row for."""
    ids = [13, 2, 9, 3, 4, 7, 15, 11, 6, 1, 5]
    twin = TableModel(16, order=2, num_phases=3)
    config = {"method": method, "model": Loaded(twin, None), "draft_vocab_size": len(ids)}
    speculation = registry.parse(config | {"draft_vocabulary": listing(tmp_path, ids)})
    found = engine(TARGET, speculation.build, k=4)
    seen = watch(found)
    (request,) = found.add(PROMPT, params := SamplingParams(**mode, max_tokens=60))
    drain(found)
    assert found.num_failed_drafts == 0 and seen
    assert {token for _, draft in seen for token in draft.tokens} <= set(ids)
    others = [token for token in range(16) if token not in ids]
    for text, draft in seen:
        if draft.probs is None:
            continue
        assert draft.probs.shape == (len(draft), 16) and not draft.probs[:, others].any()
        bias = {token: -float("inf") for token in others}
        alone = replace(params, logit_bias=bias)
        wanted = warp(TARGET.logits_of(text)[None], alone, request.prompt, [text[3:]])[0]
        assert torch.allclose(draft.probs[0], wanted)
    if params.greedy or params.seed:
        assert tuple(request.output) == expected(PROMPT, params)
        wrong = right = 0
        for (text, draft), accepted in zip(seen, request.stats.per_step_accepted, strict=True):
            right += accepted
            if accepted < len(draft) and len(text) + accepted < len(request.tokens):
                wrong += 1
                assert request.tokens[len(text) + accepted] in others
        assert right > 10 and wrong > 0


def test_the_number_alone_means_the_lowest_ids_and_the_end_of_text(tmp_path):
    target = TableModel(16, order=2, num_phases=3, eos={12})
    build = registry.parse({"method": "draft_model", "model": Loaded(target, None), "draft_vocab_size": 5}).build
    drafter = engine(target, build).drafter
    assert drafter.reduced.ids_M.tolist() == [0, 1, 2, 3, 12]
    assert drafter.describe() == "table, the lowest 5 of 16 tokens"
    whole = registry.parse({"method": "draft_model", "model": Loaded(target, None), "draft_vocab_size": 16}).build
    assert engine(target, whole).drafter.reduced is None


def test_a_list_of_other_tokens_is_refused(tmp_path):
    path = listing(tmp_path, [1, 2], tokenizer=ByteTokenizer(17, first_byte=66))
    speculation = registry.parse(
        {"method": "draft_model", "model": Loaded(TARGET, None), "draft_vocabulary": str(path)}
    )
    with pytest.raises(DraftError, match="tokens.json was made for table, whose tokens are not those of table"):
        engine(TARGET, speculation.build, tokenizer=ByteTokenizer(17, first_byte=65))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"draft_vocab_size": 0}, "draft_vocab_size must be a whole number from 1, not 0"),
        ({"draft_vocab_size": True}, "draft_vocab_size must be"),
        ({"draft_vocabulary": 7}, "draft_vocabulary must name a file"),
    ],
)
def test_parts_of_heads_that_make_no_sense(options, says):
    with pytest.raises(OptionError, match=says):
        registry.parse({"method": "draft_model", "model": "x"} | options)


def test_a_draft_model_is_quantised_as_its_target_unless_told():
    def loading(target, **options):
        return DraftModelOptions(model="x", **options).loading(replace(TARGET.info, quantization=target))

    assert [loading(target) for target in ("none", "int8", "int4")] == ["none", "int8", "int4"]
    assert loading("int8", quantization="none") == "none" and loading("none", quantization="int4") == "int4"


def test_a_trained_head_is_no_draft_model(tmp_path):
    (tmp_path / "config.json").write_text('{"speculators_model_type": "eagle3"}')
    config = {"method": "draft_model", "model": str(tmp_path)}
    with pytest.raises(DraftError, match="is a trained head, no draft model: use method 'eagle3'"):
        LLM.from_model(tiny_model("llama"), speculative_config=config)

"""fast == plain, token for token: whatever drafts, however much, wherever a text begins and ends.

The oracle (`tests.fakes.oracle`) has no engine, no cache and no drafts: it asks the model for one law after another.
Everything is float64, so that a difference is a mistake and never rounding.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pilotfish.decoding.draft import Draft
from pilotfish.decoding.sampling import SamplingParams
from pilotfish.drafters import registry
from pilotfish.models.huggingface import HuggingFaceLM
from pilotfish.models.load import Loaded
from pilotfish.models.tokenizer import Detokenizer
from tests.adversaries import FAILING, Scripted, adversaries, foresight, method_config, random_trees
from tests.fakes import ByteTokenizer, TableModel, drain, engine, oracle, run
from tests.models.tiny import tiny_model

TABLE = TableModel(16, order=2, num_phases=5, eos={15})
PROMPT = [3, 1, 4, 1, 5, 9]
SEEDED = [
    SamplingParams(temperature=0),
    SamplingParams(seed=11),
    SamplingParams(seed=12, temperature=0.7, top_p=0.9),
    SamplingParams(seed=13, temperature=1.6, top_k=5, min_p=0.02),
    SamplingParams(seed=14, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(temperature=0, frequency_penalty=1.0, logit_bias={2: 3.0, 7: -float("inf")}, min_tokens=5),
    SamplingParams(seed=15, begin_suppress_tokens=range(8)),
]


def said(
    prompt: Sequence[int], params: SamplingParams, max_length: int = 256, model: TableModel = TABLE
) -> tuple[int, ...]:
    return oracle(model.logits_of, prompt, params, eos=model.info.eos_ids, max_length=max_length)


def with_(params: SamplingParams, **changes: Any) -> SamplingParams:
    return SamplingParams(**{name: getattr(params, name) for name in SamplingParams.__slots__} | changes)


@pytest.mark.parametrize("params", SEEDED, ids=range(len(SEEDED)))
@pytest.mark.parametrize("name", adversaries(TABLE))
def test_no_drafter_changes_a_token(name, params):
    for k in range(1, 9):
        params = with_(params, max_tokens=20 + k)
        found = engine(TABLE, adversaries(TABLE)[name](), k=k)
        assert run(found, PROMPT, params) == said(PROMPT, params), k
        assert (found.num_failed_drafts > 0) == (name in FAILING)


def test_the_oracle_tells_the_tables_apart():
    """The control: another model, another phase or one token less in the prompt is another text."""
    params = SamplingParams(temperature=0, max_tokens=20)
    others = [TableModel(16, order=2, num_phases=5, seed=1), TableModel(16, order=2, num_phases=4)]
    texts = {said(PROMPT, params), said(PROMPT[1:], params), *(said(PROMPT, params, model=other) for other in others)}
    assert len(texts) == 4


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_all_of_a_right_draft_is_accepted(k, rule):
    for params in [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(max_tokens=30, ignore_eos=True),
    ]:
        found = engine(TABLE, foresight(TABLE), k=k, rule=rule)
        (request,) = found.add(PROMPT, params)
        drain(found)
        assert request.stats.per_step_accepted == request.stats.per_step_drafted
        assert request.stats.num_steps == -(-30 // (k + 1))


# -- where texts end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["always right", "random trees", "sampled trees", "sampled chain"])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_max_tokens_inside_a_run(name, k):
    for max_tokens, params in itertools.product(range(1, k + 3), SEEDED[:2]):
        params = with_(params, max_tokens=max_tokens, ignore_eos=True)
        found = engine(TABLE, adversaries(TABLE)[name](), k=k)
        (request,) = found.add(PROMPT, params)
        drain(found)
        assert tuple(request.output) == said(PROMPT, params)
        assert (request.num_output, request.finish) == (max_tokens, "length")


@pytest.mark.parametrize("name", ["always right", "random trees", "too long"])
def test_the_context_s_end(name):
    """Prompts that end K + 2 tokens before it, up to the last place; no row beyond it is ever fed (the fake checks)."""
    k, model = 5, TableModel(16, num_phases=5, context=24)
    for length in range(24 - k - 2, 24):
        for params in SEEDED[:2]:
            params = with_(params, max_tokens=50)
            prompt = [(7 * i + length) % 16 for i in range(length)]
            found = engine(model, adversaries(model)[name](), k=k)
            (request,) = found.add(prompt, params)
            drain(found)
            assert tuple(request.output) == said(prompt, params, 24, model)
            assert (len(request.tokens), request.finish) == (24, "length")


@pytest.mark.parametrize("name", ["always right", "random trees", "sampled trees"])
def test_the_end_of_text_inside_a_run(name):
    """Whatever token is declared to end the text, wherever it lies in a run."""
    for params in SEEDED[:2]:
        whole = said(PROMPT, with_(params, max_tokens=16, ignore_eos=True))
        for at in range(len(whole)):
            stopping = with_(params, max_tokens=16, ignore_eos=True, stop_token_ids=[whole[at]])
            found = engine(TABLE, adversaries(TABLE)[name](), k=6)
            (request,) = found.add(PROMPT, stopping)
            drain(found)
            assert tuple(request.output) == whole[: whole.index(whole[at]) + 1]
            assert (request.finish, request.stop_reason) == ("stop", whole[at])
            assert len(request.logprobs) == 0


def test_stop_strings_inside_a_run():
    """Every substring of one to three characters of the text as a stop string."""
    tokenizer = ByteTokenizer(64, first_byte=32)
    model = TableModel(64, order=1, num_phases=3, seed=2)
    for params in SEEDED[:2]:
        whole = tokenizer.decode(said(PROMPT, with_(params, max_tokens=14), model=model))
        stops = {whole[i : i + n] for i in range(len(whole)) for n in (1, 2, 3)}
        for stop in sorted(stops):
            results = []
            for drafter in (None, foresight(model), random_trees(64, model.law)):
                found = engine(model, drafter, k=7, tokenizer=tokenizer)
                stopping = with_(params, max_tokens=14, stop=[stop, "~~"])
                (request,) = found.add(PROMPT, stopping, text_stream=lambda: Detokenizer(tokenizer))
                events = drain(found)
                assert "".join(event.text for event in events) == request.text == whole[: whole.index(stop)]
                assert sum(len(event.tokens) for event in events) == request.num_output
                assert request.stop_reason == stop
                results.append((request.text, request.output))
            assert results[0] == results[1] == results[2]


# -- real attention --------------------------------------------------------------------------------------------------

WINDOW = 6


@functools.cache
def tiny(kind: str, seed: int = 0) -> HuggingFaceLM:
    return HuggingFaceLM(tiny_model(kind, seed=seed))


@functools.cache
def stock(kind: str) -> Any:
    model = tiny_model(kind)

    @functools.cache
    def logits_of(text: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]

    return lambda text: logits_of(tuple(text))


def drafters_for(kind: str) -> dict[str, Any]:
    """All methods of the package, with a related model where one is wanted, and trees of random tokens."""
    draft = Loaded(tiny(kind, 1), None)
    found: dict[str, Any] = {m: registry.parse(method_config(m, draft)).build for m in registry.methods()}
    return found | {"trees": lambda _setting: random_trees(64)}


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("method", drafters_for("llama"))
def test_real_models_say_what_the_stock_model_says(method, kind):
    build = drafters_for(kind)[method]
    text = [(5 * i * i + 3 * i) % 64 for i in range(40)]
    looping = [7, 8, 9] * 8
    cases = [(text[:9], SEEDED[0]), (looping, SEEDED[0]), (looping[:7], SEEDED[2]), (text[:30], SEEDED[4])]
    cases = [(prompt, with_(params, max_tokens=12)) for prompt, params in cases]
    expected = [oracle(stock(kind), prompt, params) for prompt, params in cases]
    for options in ({}, {"max_num_batched_tokens": 6, "max_num_seqs": 3, "num_pages": 14}):
        found = engine(tiny(kind), build, k=5, **options)
        requests = [found.add(prompt, params)[0] for prompt, params in cases]
        drain(found)
        assert [tuple(r.output) for r in requests] == expected
        assert found.num_failed_drafts == 0


@pytest.mark.parametrize("k", [1, 4])
def test_the_edge_of_a_sliding_window(k):
    """Prompts that end shortly before, at, and after the window's length, in one batch."""
    prompts = [[(11 * i + n) % 64 for i in range(n)] for n in range(WINDOW - 1, WINDOW + k + 3)]
    params = SamplingParams(temperature=0, max_tokens=WINDOW + 3)
    expected = [oracle(stock("mistral"), prompt, params) for prompt in prompts]
    knowing = {tuple(p): e for p, e in zip(prompts, expected, strict=True)}
    for drafter in (random_trees(64), _told(knowing), None):
        found = engine(tiny("mistral"), drafter, k=k)
        requests = [found.add(prompt, params)[0] for prompt in prompts]
        drain(found)
        assert [tuple(r.output) for r in requests] == expected


def _told(answers: dict[tuple[int, ...], tuple[int, ...]]) -> Any:
    """A drafter that was told the answers, and offers a wrong branch before each right token."""

    def script(request: Any, limit: int) -> Draft:
        rest = answers[request.prompt][request.num_output :]
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for token in rest:
            tokens += [(token + 1) % 64, token]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return Draft(tuple(tokens), tuple(parents)).first(limit)

    return Scripted(script, trees=True)


NAN = float("nan")
MALFORMED: dict[str, Any] = {
    "no draft at all": None,
    "fractions": Draft((1.0, 2.5), (-1, 0)),  # type: ignore[arg-type]
    "truth values": Draft((True,), (-1,)),
    "names": Draft(("a",), (-1,)),  # type: ignore[arg-type]
    "lists": Draft([1, 2], [-1, 0]),  # type: ignore[arg-type]
    "a kind that cannot be counted by": Draft((1,), (-1,), kind=[1]),  # type: ignore[arg-type]
    "a law of NaN": Draft((1,), (-1,), torch.full((1, 16), NAN)),
    "a law half NaN": Draft((1, 2), (-1, 0), torch.tensor([[0.125, NAN] * 8] * 2)),
    "a law with infinity": Draft((1,), (-1,), torch.tensor([[0.125, float("inf")] * 8])),
    "a law below 0": Draft((1,), (-1,), torch.full((1, 16), -1 / 16)),
    "a law of truth values": Draft((1,), (-1,), torch.ones(1, 16, dtype=torch.bool)),
    "a law elsewhere": Draft((1,), (-1,), torch.empty(1, 16, device="meta")),
    "a law of another library": Draft((1,), (-1,), torch.ones(1, 16).numpy() / 16),  # type: ignore[arg-type]
    "a sparse law": Draft((1,), (-1,), torch.ones(1, 16).to_sparse()),
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_malformed_draft_fails_no_request(name, rule):
    """Where no rule could make sense of it, the step decodes plainly."""
    for params in (SamplingParams(temperature=0, max_tokens=9), SamplingParams(seed=3, max_tokens=9)):
        found = engine(TABLE, Scripted(lambda _request, _limit: MALFORMED[name]), rule=rule)
        (free,) = found.add(PROMPT, with_(params, temperature=1.0, seed=None, ignore_eos=True))
        (request,) = found.add(PROMPT, params)
        drain(found)
        assert tuple(request.output) == said(PROMPT, params)
        assert (free.finish, free.num_output) == ("length", 9)
        assert found.num_failed_drafts > 0


LAW = torch.full((1, 16), 1 / 16)  # exact in every float type


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("law", [LAW.bfloat16(), LAW.half(), LAW.double(), LAW.clone().requires_grad_()], ids=str)
def test_laws_of_any_float_type_are_judged(law, rule):
    found = engine(TABLE, Scripted(lambda _request, _limit: Draft((1,), (-1,), law)), rule=rule)
    same = engine(TABLE, Scripted(lambda _request, _limit: Draft((1,), (-1,), LAW)), rule=rule)
    outputs = []
    for each in (found, same):
        each.entropy = lambda: 5
        (request,) = each.add(PROMPT, SamplingParams(max_tokens=9, ignore_eos=True))
        drain(each)
        outputs.append(request.output)
    assert outputs[0] == outputs[1] and found.num_failed_drafts == 0

"""The front door: options, prompts of all kinds, streams, chat, log-probabilities, and clean failures."""

import itertools
from typing import Any

import pytest
import torch

from pilotfish import (
    LLM,
    CapacityError,
    Chunk,
    Completion,
    OptionError,
    PromptError,
    SamplingParams,
    UserError,
)
from pilotfish.models.load import Loaded
from tests.adversaries import Faulty, foresight, guesser
from tests.fakes import ByteTokenizer, TableModel, oracle
from tests.models.tiny import tiny_model

MODEL = TableModel(64, order=1, num_phases=5, seed=2, sharpness=2.0, eos={63})
TOKENIZER = ByteTokenizer(64, first_byte=32)
DRAFT = Loaded(TableModel(64, order=1, num_phases=5, seed=2, sharpness=2.0), TOKENIZER)
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SEEDED = SamplingParams(seed=7, max_tokens=16, ignore_eos=True)
STOPPING = SamplingParams(seed=3, max_tokens=40, stop=["E", "QX"])
DRAFTING: list[dict[str, Any]] = [
    {},
    {"method": "ngram"},
    {"draft_model": DRAFT, "num_speculative_tokens": 3},
    {"speculative_config": {"method": "suffix", "num_speculative_tokens": 8}},
]


def llm(model: Any = MODEL, tokenizer: Any = TOKENIZER, **options: Any) -> LLM:
    return LLM.from_model(Loaded(model, tokenizer), **options)


def expected(prompt: str | list[int], params: SamplingParams) -> tuple[int, ...]:
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    return oracle(MODEL.logits_of, ids, params, eos=MODEL.info.eos_ids)


def nothing_is_left(one: LLM) -> bool:
    return not one.engine.has_work and one.engine.cache.pool.num_held == 0 and not one._inboxes


@pytest.fixture(autouse=True)
def _same_coins(monkeypatch):
    """Requests without a seed get the same noise in every run."""
    coins = itertools.count(1)
    monkeypatch.setattr("secrets.randbits", lambda _bits: next(coins))


# -- prompts and results --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", DRAFTING, ids=range(4))
def test_texts_and_ids_in_lists_and_alone(options):
    one = llm(**options)
    ids = TOKENIZER.encode("TAKE A SEAT")
    for prompts in ("TAKE A SEAT", ["TAKE A SEAT"], ids, tuple(ids), [ids], [tuple(ids)]):
        (done,) = one.generate(prompts, GREEDY)
        assert isinstance(done, Completion)
        assert done.token_ids == expected("TAKE A SEAT", GREEDY)
        assert done.text == TOKENIZER.decode(done.token_ids)
        assert (done.index, done.finish_reason, done.error, done.logprobs) == (0, "length", None, None)
        assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (11, 16, 27)
    mixed = ["A", ids, "BC", (5, 6)]
    done = one.generate(mixed, SEEDED)
    assert [d.token_ids for d in done] == [expected(list(p) if isinstance(p, tuple) else p, SEEDED) for p in mixed]
    assert [d.index for d in done] == [0, 1, 2, 3]
    assert one.generate([], GREEDY) == []
    assert nothing_is_left(one)


def test_params_for_each_and_several_choices():
    one = llm(method="ngram")
    each = [GREEDY, SamplingParams(seed=1, n=3, max_tokens=5), SEEDED]
    done = one.generate(["A", "B", "C"], each)
    assert [d.index for d in done] == [0, 1, 2, 3, 4]
    assert (done[0].token_ids, done[4].token_ids) == (expected("A", GREEDY), expected("C", SEEDED))
    assert done[1].token_ids == expected("B", SamplingParams(seed=1, max_tokens=5))
    assert len({d.token_ids for d in done[1:4]}) == 3
    assert len(one.generate("A", SamplingParams(n=2, max_tokens=3))) == 2
    (default,) = one.generate("A")
    assert default.usage.completion_tokens == 256 - 1 or default.finish_reason == "stop"  # the context, or the end


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (("",), PromptError, "the prompt is empty"),
        (([[]],), PromptError, "the prompt is empty"),
        (([1, 64],), PromptError, "prompt token 64 is not an id from 0 to 63"),
        (([1, None],), PromptError, "a prompt is a text or a list of token ids, not 1"),
        ((5,), PromptError, "a prompt is a text or a list of token ids, not 5"),
        ((b"ABC",), PromptError, "a text or a list of token ids, not b'ABC'"),
        (({"prompt": "A"},), PromptError, "a text or a list of token ids, not {'prompt': 'A'}"),
        (("\ud800",), PromptError, "is not Unicode: surrogates not allowed at 0"),
        (("A", {"temperature": 0}), OptionError, "params must be SamplingParams"),
        ((["A"], [None]), OptionError, "params must be SamplingParams"),
        (("A" * 256,), PromptError, "256 tokens and the context 256"),
        ((["A", "B"], [GREEDY]), OptionError, "2 prompts but 1 params: give one for each"),
        ((["A"], []), OptionError, "1 prompts but 0 params"),
        (("A", SamplingParams(stop_token_ids=[64])), OptionError, "stop_token_ids names token 64"),
        (("A" * 20, SamplingParams(max_tokens=50)), CapacityError, "need 70 rows, and the page pool holds 64"),
    ],
)
def test_what_cannot_be_served_is_said_before_anything_runs(arguments, error, says):
    one = llm(num_pages=4)
    with pytest.raises(error, match=says):
        one.generate(*arguments)
    assert issubclass(error, UserError) and issubclass(error, ValueError)
    assert nothing_is_left(one)


def test_an_error_in_one_prompt_of_a_list_leaves_nothing_behind():
    one = llm(method="ngram")
    passes = MODEL.num_passes
    for bad in ("", [99], "A" * 300):
        with pytest.raises(PromptError):
            one.generate(["FINE", "FINE TOO", bad, "FINE"], GREEDY)
        assert nothing_is_left(one)
    assert MODEL.num_passes == passes
    assert one.generate("FINE", GREEDY)[0].token_ids == expected("FINE", GREEDY)


def test_without_a_tokenizer_ids_are_all_there_is():
    one = llm(tokenizer=None)
    (done,) = one.generate([[3, 1, 4]], GREEDY)
    assert (done.token_ids, done.text) == (expected([3, 1, 4], GREEDY), "")
    with pytest.raises(PromptError, match="no tokenizer: give prompts as token ids"):
        one.generate("A")
    with pytest.raises(PromptError, match="chat needs a tokenizer"):
        one.chat([{"role": "user", "content": "A"}])
    with pytest.raises(OptionError, match="stop strings need a tokenizer; use stop_token_ids"):
        one.generate([3, 1, 4], SamplingParams(stop="A"))
    assert nothing_is_left(one)


def test_stops_and_why():
    for options in DRAFTING:
        one = llm(**options)
        whole = one.generate("STOP", GREEDY)[0]
        stop = whole.text[4:6]
        (cut,) = one.generate("STOP", SamplingParams(temperature=0, max_tokens=16, stop=stop))
        assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
        assert cut.text == whole.text[: whole.text.index(stop)]
        (shown,) = one.generate(
            "STOP", SamplingParams(temperature=0, max_tokens=16, stop=[stop], include_stop_str_in_output=True)
        )
        assert shown.text == cut.text + stop
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
        token = whole.token_ids[5]
        (by_id,) = one.generate("STOP", SamplingParams(temperature=0, max_tokens=16, stop_token_ids=[token]))
        assert (by_id.finish_reason, by_id.stop_reason) == ("stop", token)
        forced = SamplingParams(temperature=0, max_tokens=16, logit_bias={63: 100.0})
        (ended,) = one.generate("STOP", forced)
        assert (ended.finish_reason, ended.stop_reason, ended.token_ids, ended.text) == ("stop", None, (63,), "")


def test_the_report_of_what_drafting_did():
    """vLLM's field names, and numbers that add up."""
    names = [
        "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram",
        "acceptance_histogram_by_draft_length", "num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens",
        "num_spec_tokens", "per_step_accepted", "per_step_drafted",
    ]  # fmt: skip
    right = llm(draft_model=DRAFT, num_speculative_tokens=3).generate("A", GREEDY)[0].speculative_decoding
    assert list(right) == names
    assert right["per_step_drafted"] == right["per_step_accepted"] == [3, 3, 3, 3]
    assert (right["mean_acceptance_length"], right["draft_acceptance_rate"]) == (4, 1)
    assert (right["acceptance_histogram"], right["num_spec_tokens"]) == ([0, 0, 0, 4], 3)
    assert right["acceptance_histogram_by_draft_length"] == {3: [0, 0, 0, 4]}
    assert (right["num_spec_steps"], right["num_draft_tokens"], right["num_accepted_draft_tokens"]) == (4, 12, 12)
    plain = llm().generate("A", GREEDY)[0].speculative_decoding
    assert list(plain) == names
    assert (plain["num_spec_steps"], plain["mean_acceptance_length"], plain["draft_acceptance_rate"]) == (0, 1, 0)


# -- log-probabilities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 1, "temperature": 0.8, "top_k": 5}], ids=str)
def test_log_probabilities_of_a_real_model(params):
    """The stock model's own log-softmax, after warping; the same with and without drafting."""
    stock = tiny_model("llama")
    params = SamplingParams(**params, max_tokens=10, logprobs=4)
    prompt = [7, 8, 9] * 4
    plain, fast = (
        LLM.from_model(tiny_model("llama"), method=method, num_speculative_tokens=6).generate(prompt, params)[0]
        for method in ("none", "ngram")
    )
    assert fast.speculative_decoding["num_draft_tokens"] > 0
    assert plain.token_ids == fast.token_ids
    assert len(plain.logprobs) == len(fast.logprobs) == 10
    with torch.inference_mode():
        logits_TV = stock(input_ids=torch.tensor([[*prompt, *plain.token_ids]])).logits[0, len(prompt) - 1 : -1]
    if params.temperature:
        logits_TV = logits_TV / 0.8
        logits_TV = logits_TV.masked_fill(logits_TV < logits_TV.topk(5).values[:, -1:], -float("inf"))
    law_TV = torch.log_softmax(logits_TV, 1)
    for token, a, b, law_V in zip(plain.token_ids, plain.logprobs, fast.logprobs, law_TV, strict=True):
        assert a.token == b.token == token
        assert a.logprob == pytest.approx(b.logprob) == pytest.approx(float(law_V[token]))
        values, ids = law_V.topk(4)
        assert [i for i, _ in a.top] == [i for i, _ in b.top] == ids.tolist()
        assert [v for _, v in a.top] == pytest.approx(values.tolist())


def test_without_alternatives_a_log_probability_each():
    (done,) = llm().generate("A", SamplingParams(temperature=0, max_tokens=4, logprobs=0))
    assert [entry.top for entry in done.logprobs] == [()] * 4
    assert all(entry.logprob < 0 for entry in done.logprobs)


# -- streams --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SEEDED, STOPPING], ids=range(3))
@pytest.mark.parametrize("options", DRAFTING, ids=range(4))
def test_a_stream_says_what_generate_says(options, params):
    one = llm(**options)
    (whole,) = one.generate("ONCE UPON", params)
    chunks = list(one.stream("ONCE UPON", params))
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == whole.token_ids
    assert [chunk.completion for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].completion.token_ids == whole.token_ids
    report = chunks[-1].completion.speculative_decoding
    assert sum(chunk.num_accepted for chunk in chunks) == report["num_accepted_draft_tokens"]
    assert sum(chunk.num_drafted for chunk in chunks) == report["num_draft_tokens"]
    assert nothing_is_left(one)


def test_closing_a_stream_frees_its_pages():
    one = llm(draft_model=DRAFT)
    stream = one.stream("ONCE UPON", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    assert one.engine.cache.pool.num_held > 0
    stream.close()
    assert nothing_is_left(one)
    assert one.engine.drafter.cache.pool.num_held == 0


@pytest.mark.parametrize("options", DRAFTING, ids=range(4))
def test_streams_read_in_turns_lose_nothing(options):
    """A step serves everybody; what it does for another stream waits there until that one is read on."""
    one = llm(**options)
    wanted = [expected(prompt, SEEDED) for prompt in ("A", "BB", "CCC")]
    streams = [one.stream(prompt, SEEDED) for prompt in ("A", "BB", "CCC")]
    got: list[list[int]] = [[], [], []]
    texts, ends = ["", "", ""], [0, 0, 0]
    for turn in itertools.cycle(range(3)):
        chunk = next(streams[turn], None)
        if chunk is None:
            break
        got[turn] += chunk.token_ids
        texts[turn] += chunk.text
        ends[turn] += chunk.completion is not None
        if len(got[0]) > 5:
            assert one.generate("IN BETWEEN", GREEDY)[0].token_ids == expected("IN BETWEEN", GREEDY)
    for turn, stream in enumerate(streams):
        for chunk in stream:
            got[turn] += chunk.token_ids
            texts[turn] += chunk.text
            ends[turn] += chunk.completion is not None
    assert [tuple(tokens) for tokens in got] == wanted
    assert texts == [TOKENIZER.decode(tokens) for tokens in wanted]
    assert ends == [1, 1, 1]
    assert nothing_is_left(one)


def test_characters_are_not_torn():
    """A model that says bytes of UTF-8: no chunk ends inside a character."""
    text = "déjà vu, 日本語, 🐟🐟"
    ids = list(text.encode())
    bytes_ = TableModel(257, order=1)

    def logits_of(context: Any, *, whole: bool = True) -> torch.Tensor:
        logits_V = torch.zeros(257, dtype=torch.float64)
        logits_V[ids[len(context) - 1] if len(context) <= len(ids) else 256] = 9
        return logits_V

    bytes_.logits_of = logits_of  # type: ignore[method-assign]
    one = llm(bytes_, ByteTokenizer())
    for drafter in (one.engine.drafter, foresight(bytes_)):  # byte by byte, and several at once
        one.engine.drafter = drafter
        chunks = list(one.stream([0], SamplingParams(temperature=0, max_tokens=len(ids))))
        assert "".join(chunk.text for chunk in chunks) == text
        assert not any("\ufffd" in chunk.text for chunk in chunks)


def test_a_stream_is_one_completion():
    one = llm()
    with pytest.raises(OptionError, match="stream gives one completion; use generate for n > 1"):
        next(one.stream("A", SamplingParams(n=2)))
    with pytest.raises(PromptError, match="the prompt is empty"):
        next(one.stream(""))
    assert nothing_is_left(one)


# -- references and chat --------------------------------------------------------------------------------------------


def test_references_are_for_drafters_and_change_nothing():
    one = llm(method="ngram", num_speculative_tokens=7)
    (plain,) = one.generate("A", GREEDY)
    answer = list(plain.token_ids)
    for reference in (TOKENIZER.decode(answer), answer):
        (helped,) = one.generate("A", GREEDY, references=[reference])
        assert helped.token_ids == plain.token_ids
        assert helped.speculative_decoding["num_accepted_draft_tokens"] > 8
        chunks = list(one.stream("A", GREEDY, reference=reference))
        assert chunks[-1].completion.speculative_decoding == helped.speculative_decoding
    helped, alone = one.generate(["A", "A"], GREEDY, references=[answer, None])
    assert helped.token_ids == alone.token_ids == plain.token_ids
    with pytest.raises(OptionError, match="2 prompts but 1 references"):
        one.generate(["A", "B"], GREEDY, references=[answer])
    with pytest.raises(PromptError, match="reference token 70"):
        one.generate(["A"], GREEDY, references=[[1, 70]])
    assert nothing_is_left(one)


def test_chat_goes_through_the_template():
    model, messages = TableModel(128, order=1), [{"role": "user", "content": "Hello"}]
    one = llm(model, ByteTokenizer(128))
    ids = list(b"[user]Hello\n")
    assert one.chat_prompt(messages) == ids
    assert one.chat(messages, GREEDY).token_ids == oracle(model.logits_of, ids, GREEDY)


# -- when something goes wrong --------------------------------------------------------------------------------------


def test_nan_fails_one_completion_and_the_others_are_returned():
    model = TableModel(64, order=1, num_phases=5, seed=2, sharpness=2.0, poison={7})
    tame = SamplingParams(temperature=0, max_tokens=9, logit_bias={7: -float("inf")})
    for drafter in (guesser(64), guesser(8)):
        one = llm(model)
        one.engine.drafter = drafter
        broken, sound = one.generate([[1, 7], [1, 2]], tame)
        assert (broken.finish_reason, broken.token_ids) == ("error", ())
        assert "NaN" in broken.error
        assert (sound.finish_reason, sound.error) == ("length", None)
        assert sound.token_ids == oracle(MODEL.logits_of, [1, 2], tame)
        (chunk,) = one.stream([1, 7], tame)
        assert chunk.completion.finish_reason == "error"
        assert nothing_is_left(one)


@pytest.mark.parametrize("also", [set(), {"observe"}, {"release"}], ids=str)
def test_a_drafter_that_raises_costs_nothing_but_speed(also, caplog):
    one = llm(method="ngram")
    one.engine.drafter = Faulty(foresight(MODEL), also)
    one.engine.arms = one.engine.drafter.arms
    done = one.generate(["A", "BC"], [GREEDY, SEEDED])
    assert [d.token_ids for d in done] == [expected("A", GREEDY), expected("BC", SEEDED)]
    assert "the drafter failed" in caplog.text
    assert nothing_is_left(one)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_an_interrupt_leaves_no_pages_held(at, error):
    class Interrupted(TableModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            if self.num_passes == at:
                raise error
            return output

    model = Interrupted(64, order=1, num_phases=5, seed=2, sharpness=2.0)
    one = llm(model, draft_model=DRAFT, num_speculative_tokens=2)
    with pytest.raises(error):
        one.generate(["A", "BC", "DEF"], GREEDY)
    assert nothing_is_left(one)
    assert one.engine.drafter.cache.pool.num_held == 0
    model.num_passes = 0
    with pytest.raises(error):
        list(one.stream("A", GREEDY))
    assert nothing_is_left(one)
    assert one.generate("A", GREEDY)[0].token_ids == expected("A", GREEDY)


def test_around_a_model_of_hugging_face_s():
    """The model is left as it was, and what comes out is what its own generate says."""
    model = tiny_model("llama")
    one = LLM.from_model(model, method="ngram")
    (done,) = one.generate([7, 8, 9, 7, 8], SamplingParams(temperature=0, max_tokens=20))
    with torch.inference_mode():
        own = model.generate(torch.tensor([[7, 8, 9, 7, 8]]), max_new_tokens=20, do_sample=False)
    assert list(done.token_ids) == own[0, 5:].tolist()


@pytest.mark.parametrize("messages", [None, "Hello", {"role": "user"}, [{"rol": "user"}], ["Hello"], []], ids=str)
def test_what_is_no_conversation(messages):
    with pytest.raises(PromptError, match="messages are a list such as"):
        llm().chat(messages)


def test_a_conversation_that_is_not_unicode():
    with pytest.raises(PromptError, match="is not Unicode: surrogates not allowed at 1"):
        llm().chat([{"role": "user", "content": "a\udcffb"}])


@pytest.mark.parametrize("references", ["A", 5, {"A": 1}], ids=str)
def test_references_that_are_no_list(references):
    with pytest.raises(OptionError, match="references must be a list"):
        llm(method="ngram").generate("A", GREEDY, references=references)


def test_what_drafting_gained_greets_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path))
    one = llm(method="ngram")
    assert "gain not known yet" in one.describe() and one.predicted_gain is None
    one.generate([[1, 2, 3] * 4] * 2, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    gain = one.predicted_gain
    assert gain is not None and f"predicted gain {gain:.2f} x, as in earlier runs" in llm(method="ngram").describe()
    assert "gain not known yet" in llm(method="suffix").describe()
    assert llm(method="ngram", num_speculative_tokens=3).predicted_gain is None
    (record,) = (tmp_path / "costs").glob("*.gain")
    record.write_text('{"gain": -1, "tokens": 5}')
    assert "gain not known yet" in llm(method="ngram").describe()

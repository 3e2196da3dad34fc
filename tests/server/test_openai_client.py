"""The real `openai` client, over a real socket: every feature that it knows and the server serves, and its errors.

Skipped where the client is not installed.
"""

import asyncio
import json
import math

import pytest

from pilotfish import SamplingParams
from tests.server.fakes import MESSAGES, PHRASE, TOKENIZER, a_server, expected, listening, singer, table
from tests.server.test_tools import CLOCK, ROME, WEATHER, speaker

openai = pytest.importorskip("openai", reason="the openai client is not installed")
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2, 30]}, "b": {"type": "boolean"}}, "required": ["a", "b"],
          "additionalProperties": False}  # fmt: skip
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
KEY = "sesame"


@pytest.fixture(scope="module")
def address():
    server = a_server(table(context=512), served_model_name="pilot", api_key=KEY, max_completion_tokens=400)
    with listening(server) as address:
        yield f"{address}v1"


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=address, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def chat(client):
    return lambda **more: client.chat.completions.create(model="pilot", messages=MESSAGES, **more)


@pytest.fixture
def complete(client):
    return lambda **more: client.completions.create(model="pilot", prompt="hello", **more)


def said(params, prompt=None):
    """The library's texts, plainly decoded."""
    prompt = TOKENIZER.chat(MESSAGES) if prompt is None else prompt
    return [one.text for one in expected(prompt, SamplingParams(**params), table(context=512))]


def contents(chunks, index=0):
    own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in own)


@pytest.mark.parametrize("shape", [{"temperature": 0}, {"seed": 5}, {"seed": 5, "temperature": 0.7, "top_p": 0.9}])
def test_a_chat_whole_and_streamed_is_the_library_s(chat, shape):
    shape = shape | {"max_tokens": 20}
    (wanted,) = said({"temperature": 1.0} | shape)
    whole = chat(**shape)
    assert whole.choices[0].message.content == wanted and whole.choices[0].message.role == "assistant"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.object == "chat.completion" and whole.model == "pilot"
    with chat(**shape, stream=True) as stream:
        chunks = list(stream)
    assert contents(chunks) == wanted and all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_the_usage_chunk_is_the_last_and_says_what_drafting_did(chat):
    shape = {"seed": 2, "max_tokens": 40, "stream": True}
    chunks = list(chat(**shape, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
    block = chunks[-1].model_extra["metrics"]["speculative_decoding"]
    assert block["num_spec_steps"] == sum(block["acceptance_histogram"])
    by_length = block["acceptance_histogram_by_draft_length"]
    assert sum(map(sum, by_length.values())) == block["num_spec_steps"]
    assert all(len(counts) == int(length) + 1 for length, counts in by_length.items())
    so_far = list(chat(**shape, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    counts = [chunk.usage.completion_tokens for chunk in so_far]
    assert counts == sorted(counts) and counts[0] == 0 < counts[2] and counts[-1] == chunks[-1].usage.completion_tokens


def test_several_choices_have_their_own_texts(chat):
    shape = {"seed": 1, "max_tokens": 12, "n": 3}
    wanted = said(shape)
    assert [choice.message.content for choice in chat(**shape).choices] == wanted
    chunks = list(chat(**shape, stream=True))
    assert [contents(chunks, index) for index in range(3)] == wanted


def test_a_stop_string_ends_the_text(complete):
    (whole,) = said({"temperature": 0, "max_tokens": 30}, "hello")
    stop = whole[3:5]
    (choice,) = complete(temperature=0, max_tokens=30, stop=[stop]).choices
    assert choice.text == whole[: whole.index(stop)] and choice.finish_reason == "stop"


def test_log_probabilities_of_chats(chat):
    shape = {"seed": 3, "max_tokens": 10, "logprobs": True, "top_logprobs": 4}
    whole = chat(**shape)
    entries = whole.choices[0].logprobs.content
    assert len(entries) == whole.usage.completion_tokens
    for entry in entries:
        assert len(entry.top_logprobs) == 4 and entry.logprob <= entry.top_logprobs[0].logprob <= 0
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + 1e-6
        assert isinstance(entry.bytes, list)
    streamed = [entry for chunk in chat(**shape, stream=True) for choice in chunk.choices
                if choice.logprobs for entry in choice.logprobs.content]  # fmt: skip
    assert streamed == entries
    assert chat(seed=3, max_tokens=10).choices[0].logprobs is None


def test_plain_completions(complete):
    (wanted,) = said({"seed": 4, "max_tokens": 12}, "hello")
    whole = complete(seed=4, max_tokens=12, logprobs=2, user="me", logit_bias=None)
    assert whole.choices[0].text == wanted and whole.object == "text_completion"
    table = whole.choices[0].logprobs
    assert len(table.tokens) == len(table.token_logprobs) == len(table.text_offset) == whole.usage.completion_tokens
    assert all(name in top for name, top in zip(table.tokens, table.top_logprobs, strict=True))
    assert "".join(chunk.choices[0].text for chunk in complete(seed=4, max_tokens=12, stream=True)) == wanted


def test_several_prompts_and_ids(client):
    answer = client.completions.create(model="pilot", prompt=["hello", "world"], seed=4, max_tokens=6)
    assert answer.choices[0].text == said({"seed": 4, "max_tokens": 6}, "hello")[0] and len(answer.choices) == 2
    ids = client.completions.create(model="pilot", prompt=list(b"hello"), seed=4, max_tokens=6)
    assert ids.choices[0].text == answer.choices[0].text


def test_an_answer_of_a_form(client, chat):
    for seed in range(3):
        (choice,) = chat(response_format=FORM, seed=seed, max_tokens=300).choices
        found = json.loads(choice.message.content)
        assert found["a"] in (1, 2, 30) and isinstance(found["b"], bool) and choice.finish_reason == "stop"
    streamed = contents(list(chat(response_format=FORM, seed=2, max_tokens=300, stream=True)))
    assert streamed == choice.message.content


def test_an_answer_parsed_into_a_class(client):
    """The client's own way to a form, which sends the schema that pydantic writes."""
    pydantic = pytest.importorskip("pydantic")

    class Fish(pydantic.BaseModel):
        fast: bool
        size: int = pydantic.Field(ge=1, le=9)

    asked = {"model": "pilot", "messages": MESSAGES, "response_format": Fish, "seed": 1, "max_tokens": 300}
    fish = client.chat.completions.parse(**asked).choices[0].message.parsed
    assert isinstance(fish, Fish) and 1 <= fish.size <= 9
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == fish
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_calls_of_tools_whole_and_streamed():
    with listening(a_server(speaker(f"Hm.\n{ROME}\n{ROME.replace('Rome', 'Oslo')}"))) as address:
        client = openai.OpenAI(base_url=f"{address}v1", api_key="-", max_retries=0)
        asked = {"model": client.models.list().data[0].id, "messages": MESSAGES, "tools": [WEATHER, CLOCK],
                 "temperature": 0, "max_tokens": 300}  # fmt: skip
        (choice,) = client.chat.completions.create(**asked).choices
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Hm."
        places = [json.loads(call.function.arguments)["place"] for call in choice.message.tool_calls]
        assert places == ["Rome", "Oslo"]
        with client.chat.completions.stream(**asked) as stream:
            pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
            last = stream.get_final_completion().choices[0]
        assert [call.function.arguments for call in last.message.tool_calls] == [
            call.function.arguments for call in choice.message.tool_calls
        ]
        assert len(pieces) > 4 and last.finish_reason == "tool_calls"
        answered = [{"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in choice.message.tool_calls]
        turns = [*MESSAGES, choice.message.model_dump(exclude_none=True), *answered]
        assert client.chat.completions.create(**asked | {"messages": turns}).choices
        client.close()


def test_a_call_that_is_insisted_on(chat):
    choice = {"type": "function", "function": {"name": "clock"}}
    asked = {"tools": [WEATHER, CLOCK], "tool_choice": choice, "seed": 4, "max_tokens": 200}
    (call,) = chat(**asked).choices[0].message.tool_calls
    assert call.function.name == "clock" and json.loads(call.function.arguments) == {}


def test_a_predicted_output_is_drafted_from():
    with listening(a_server(singer())) as address, openai.OpenAI(base_url=f"{address}v1", api_key="-") as client:
        asked = {"model": client.models.list().data[0].id, "messages": MESSAGES, "temperature": 0, "max_tokens": 16}
        hint = {"type": "content", "content": PHRASE * 2}
        plain, helped = (
            client.chat.completions.create(**asked),
            client.chat.completions.create(**asked, prediction=hint),
        )
    assert plain.choices[0].message.content == helped.choices[0].message.content
    accepted = [
        one.model_extra["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] for one in (plain, helped)
    ]
    assert accepted[0] < accepted[1]


def test_the_asynchronous_client(address):
    async def scene():
        async with openai.AsyncOpenAI(base_url=address, api_key=KEY, max_retries=0) as client:

            async def one(seed):
                asked = {"model": "pilot", "messages": MESSAGES, "seed": seed, "max_tokens": 12}
                whole = await client.chat.completions.create(**asked)
                stream = await client.chat.completions.create(**asked, stream=True)
                return whole.choices[0].message.content, contents([chunk async for chunk in stream])

            return await asyncio.gather(*(one(seed) for seed in range(6)))

    for seed, (whole, streamed) in enumerate(asyncio.run(scene())):
        assert whole == streamed == said({"seed": seed, "max_tokens": 12})[0]


def test_a_stream_that_is_closed_early_frees_its_pages():
    server = a_server(singer(context=4096))
    with listening(server) as address, openai.OpenAI(base_url=f"{address}v1", api_key="-") as client:
        asked = {"model": server.model, "messages": MESSAGES, "max_tokens": 3000, "temperature": 0}
        with client.chat.completions.create(**asked, stream=True) as stream:
            next(iter(stream))
    assert server.metrics.value("request_success_total", finished_reason="abort") == 1


def test_vllm_s_fields_go_in_the_extra_body(complete):
    extra = {"top_k": 1, "min_tokens": 3, "stop_token_ids": [256], "repetition_penalty": 1.2}
    (wanted,) = said({"seed": 1, "max_tokens": 9} | extra, "hello")
    assert complete(seed=1, max_tokens=9, extra_body=extra).choices[0].text == wanted
    with pytest.raises(openai.BadRequestError, match="did you mean 'top_k'"):
        complete(extra_body={"topk": 1})


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "pilot" and client.models.retrieve("pilot") == model


@pytest.mark.parametrize(
    ("more", "kind", "param"),
    [
        ({"temperature": -1}, "BadRequestError", "temperature"),
        ({"model": "gpt"}, "NotFoundError", "model"),
        ({"messages": []}, "BadRequestError", "messages"),
        ({"n": 1000}, "BadRequestError", "n"),
        ({"max_tokens": 401}, "BadRequestError", "max_tokens"),
        ({"stop": [str(i) for i in range(1000)]}, "BadRequestError", "stop"),
        ({"reasoning_effort": "high"}, "BadRequestError", "reasoning_effort"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "BadRequestError", None),
        ({"messages": [{"role": "user", "content": "x" * 5_000_000}]}, "APIStatusError", None),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "what"}}}},
         "BadRequestError", "response_format"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_errors_are_the_client_s_own_classes(client, more, kind, param):
    for stream in (False, True):
        with pytest.raises(getattr(openai, kind)) as caught:
            client.chat.completions.create(**{"model": "pilot", "messages": MESSAGES, "stream": stream} | more)
        assert caught.value.param == param and caught.value.status_code in (400, 404, 413)


def test_a_wrong_key_and_a_full_queue_are_too(address):
    with pytest.raises(openai.AuthenticationError), openai.OpenAI(base_url=address, api_key="x") as client:
        client.models.list()
    model = table()
    server = a_server(model, llm={"max_num_seqs": 1}, max_queue=0)
    with listening(server) as address, openai.OpenAI(base_url=f"{address}v1", api_key="-", max_retries=0) as client:
        asked = {"model": server.model, "prompt": "x", "max_tokens": 3}
        model.gate.clear()
        try:
            with pytest.raises(openai.RateLimitError) as caught:
                asyncio.run(_both(f"{address}v1", asked))
        finally:
            model.gate.set()
        assert int(caught.value.response.headers["retry-after"]) >= 1
        patient = client.with_options(max_retries=3)  # the client's own way: to wait as long as it is told to
        assert patient.completions.create(**asked).choices


async def _both(address, asked):
    async with openai.AsyncOpenAI(base_url=address, api_key="-", max_retries=0) as client:
        tasks = [asyncio.ensure_future(client.completions.create(**asked)) for _ in range(2)]
        done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return done.pop().result()


def test_an_error_under_way_is_raised_by_the_stream():
    model = singer(context=4096)
    server = a_server(model)
    with listening(server) as address, openai.OpenAI(base_url=f"{address}v1", api_key="-", max_retries=0) as client:
        asked = {"model": server.model, "messages": MESSAGES, "max_tokens": 3000, "temperature": 0}

        def read():
            for chunk in client.chat.completions.create(**asked, stream=True):
                if chunk.choices[0].delta.content:
                    model.num_broken = 1

        with pytest.raises(openai.APIError, match="the pass failed"):
            read()


def test_the_server_s_counters_move():
    """Negative control: what is tried above is this server, and not a client that is pleased with anything."""
    server = a_server(table(), served_model_name="pilot")
    with listening(server) as address, openai.OpenAI(base_url=f"{address}v1", api_key="-") as client:
        client.completions.create(model="pilot", prompt="x", max_tokens=5, extra_body={"ignore_eos": True})
    assert server.metrics.value("generation_tokens_total") == 5

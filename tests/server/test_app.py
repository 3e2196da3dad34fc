"""Answers: what the library says, whole and streamed, for chats and completions; and every field that shapes them."""

import json

import pytest

from pilotfish import SamplingParams
from tests.server.fakes import (
    MESSAGES,
    PHRASE,
    TOKENIZER,
    a_server,
    events,
    expected,
    joined,
    serving,
    singer,
    table,
)

SHAPES = [
    {"temperature": 0, "max_tokens": 20},
    {"seed": 5, "max_tokens": 20},
    {"seed": 5, "max_tokens": 20, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {"temperature": 0, "max_tokens": 20, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0, "max_tokens": 12, "logit_bias": {"65": 100, "66": -100}},
    {"seed": 1, "max_tokens": 12, "n": 3},
    {"seed": 1, "max_tokens": 30, "min_tokens": 6, "stop_token_ids": [65, 66, 67, *range(128, 200)]},
    {"seed": 4, "max_tokens": 30, "ignore_eos": True, "logit_bias": {"256": 5}},
]


def params_of(body):
    bias = {int(token): value for token, value in body.get("logit_bias", {}).items()} or None
    return SamplingParams(**{"temperature": 1.0} | body | {"logit_bias": bias})


@pytest.fixture(scope="module")
def server():
    return a_server(table(context=512), served_model_name="pilot")


@pytest.fixture(scope="module")
def client(server):
    with serving(server) as client:
        yield client


def complete(client, path="/v1/completions", **body):
    return client.post(path, json=({"prompt": "hello"} if path == "/v1/completions" else {"messages": MESSAGES}) | body)


def text_of(choice):
    return choice["message"]["content"] if "message" in choice else choice["text"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
def test_whole_streamed_and_the_library_say_the_same(client, path, shape):
    prompt = TOKENIZER.encode("hello") if path == "/v1/completions" else TOKENIZER.chat(MESSAGES)
    wanted = expected(prompt, params_of(shape), table(context=512))
    whole = complete(client, path, **shape).json()
    assert [text_of(choice) for choice in whole["choices"]] == [one.text for one in wanted]
    assert [choice["finish_reason"] for choice in whole["choices"]] == [one.finish_reason for one in wanted]
    num_tokens = sum(one.usage.completion_tokens for one in wanted)
    assert whole["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": num_tokens,
        "total_tokens": len(prompt) + num_tokens,
    }
    for granularity in ("run", "token"):
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = events(complete(client, path, **shape, **usage, stream_granularity=granularity))
        assert [joined(chunks, i) for i in range(len(wanted))] == [one.text for one in wanted]
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
        assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
        ends = [c for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
        assert sorted((end["index"], end["finish_reason"]) for end in ends) == [
            (i, one.finish_reason) for i, one in enumerate(wanted)
        ]
        # Without a seed of its own a text is another one each time; these are the same, so are their statistics.
        assert chunks[-1]["metrics"] == whole["metrics"]


def test_a_seed_matters(client):
    """Negative control: the texts above are equal because of the seed, not whatever the seed."""
    texts = {complete(client, seed=seed, max_tokens=20).json()["choices"][0]["text"] for seed in range(3)}
    assert len(texts) == 3


def test_names_of_what_is_sent(client):
    whole = complete(client, "/v1/chat/completions", max_tokens=3, temperature=0, model="pilot").json()
    assert whole["object"] == "chat.completion" and whole["id"].startswith("chatcmpl-") and whole["model"] == "pilot"
    assert whole["choices"][0]["message"]["role"] == "assistant"
    chunks = events(complete(client, "/v1/chat/completions", max_tokens=3, temperature=0, stream=True))
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "usage" not in chunks[-1]
    whole = complete(client, max_tokens=3, temperature=0).json()
    assert whole["object"] == "text_completion" and whole["id"].startswith("cmpl-")
    assert whole["choices"][0]["text"] and whole["choices"][0]["finish_reason"] == "length"


def test_defaults_are_openai_s(client):
    """16 tokens for a completion; for a chat, all that the context leaves."""
    assert complete(client, ignore_eos=True).json()["usage"]["completion_tokens"] == 16
    usage = complete(client, "/v1/chat/completions", ignore_eos=True, temperature=0).json()["usage"]
    assert usage["total_tokens"] == 512
    assert complete(client, "/v1/chat/completions", max_completion_tokens=2, seed=1).json()["usage"][
        "completion_tokens"
    ] in (1, 2)


def test_prompts_of_all_kinds(client):
    ids = TOKENIZER.encode("hello")
    shape = {"temperature": 0, "max_tokens": 8}
    (alone,) = complete(client, **shape).json()["choices"]
    for prompt in (ids, ["hello"], [ids]):
        (choice,) = complete(client, prompt=prompt, **shape).json()["choices"]
        assert choice == alone
    choices = complete(client, prompt=["hello", "abc"], **shape).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert choices[0]["text"] == alone["text"] != choices[1]["text"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    texts = [
        complete(client, "/v1/chat/completions", messages=one, **shape).json()["choices"][0]["message"]["content"]
        for one in (MESSAGES, parts)
    ]
    assert texts[0] == texts[1]


def test_developer_is_the_system():
    with serving(a_server()) as client:
        both = [
            client.post("/tokenize", json={"messages": [{"role": role, "content": "be brief"}]}).json()["tokens"]
            for role in ("developer", "system")
        ]
    assert both[0] == both[1] == TOKENIZER.encode("[system]be brief\n")


# -- characters and stop strings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["run", "token"])
def test_a_character_that_takes_several_tokens_comes_whole(granularity):
    """The singer's drafts are accepted, so runs begin and end inside characters."""
    with serving(a_server(singer())) as client:
        body = {"temperature": 0, "max_tokens": 60, "stream": True, "stream_granularity": granularity}
        chunks = events(complete(client, **body, stream_options={"include_usage": True}))
        pieces = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
        assert "\ufffd" not in "".join(pieces[:-1])
        whole = complete(client, temperature=0, max_tokens=60).json()["choices"][0]["text"]
    assert "".join(pieces) == whole
    assert whole.startswith(PHRASE * 3)
    assert chunks[-1]["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 20
    if granularity == "token":
        assert max(map(len, pieces[:-1])) == 1


@pytest.mark.parametrize("granularity", ["run", "token"])
@pytest.mark.parametrize("stop", ["€c🐠a", "🐠aéb€c🐠", ["x", "b€"], "c"], ids=str)
def test_a_stop_string_never_shows(stop, granularity):
    stops = [stop] if isinstance(stop, str) else stop
    song = PHRASE * 20
    at = min(song.index(one) for one in stops if one in song)
    with serving(a_server(singer())) as client:
        body = {"temperature": 0, "max_tokens": 100, "stop": stop, "stream_granularity": granularity}
        chunks = events(complete(client, **body, stream=True))
        so_far = ""
        for chunk in chunks:
            so_far += joined([chunk])
            assert song[:at].startswith(so_far)
        assert so_far == song[:at]
        (whole,) = complete(client, **body).json()["choices"]
        assert (whole["text"], whole["finish_reason"], whole["stop_reason"] in stops) == (song[:at], "stop", True)
        (kept,) = complete(client, **body, include_stop_str_in_output=True).json()["choices"]
        assert kept["text"] == song[:at] + kept["stop_reason"]


# -- log-probabilities -----------------------------------------------------------------------------------------------


def test_log_probabilities_are_the_model_s_own_for_drafted_tokens_too():
    body = {"seed": 2, "temperature": 0.5, "max_tokens": 24, "logprobs": True, "top_logprobs": 3}
    # The song has long accepted runs, and the flat rest of its law has values that are no rounding.
    model = singer()
    model.table /= 8
    found = {}
    for method in ("none", "ngram"):
        with serving(a_server(model, llm={"method": method})) as client:
            whole = complete(client, "/v1/chat/completions", **body).json()
            assert (whole["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0) == (method == "ngram")
            chunks = events(complete(client, "/v1/chat/completions", **body, stream=True))
        streamed = [
            entry
            for chunk in chunks
            for choice in chunk["choices"]
            for entry in (choice["logprobs"] or {"content": []})["content"]
        ]
        found[method] = whole["choices"][0]["logprobs"]["content"]
        assert streamed == found[method]
    assert len(found["none"]) == whole["usage"]["completion_tokens"]
    assert found["ngram"] == found["none"]
    text = TOKENIZER.chat(MESSAGES)
    (wanted,) = expected(text, SamplingParams(seed=2, temperature=0.5, max_tokens=24), model)
    for entry, token in zip(found["none"], wanted.token_ids, strict=True):
        law = model.law(text).log()
        assert entry["logprob"] == pytest.approx(float(law[token]))
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(law.topk(3).values.tolist())
        text.append(token)


def test_log_probabilities_of_completions_stand_in_columns(client):
    body = {"seed": 2, "max_tokens": 9, "ignore_eos": True, "logprobs": 2}
    whole = complete(client, **body).json()["choices"][0]["logprobs"]
    assert {len(column) for column in whole.values()} == {9}
    for token, value, top in zip(whole["tokens"], whole["token_logprobs"], whole["top_logprobs"], strict=True):
        assert top[token] == value and 2 <= len(top) <= 3
        assert value <= max(top.values()) <= 0
    assert whole["text_offset"][0] == 0 and whole["text_offset"] == sorted(whole["text_offset"])
    chunks = events(complete(client, **body, stream=True, stream_granularity="token"))
    parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    assert {name: [value for part in parts for value in part[name]] for name in whole} == whole
    assert complete(client, **{**body, "logprobs": None}).json()["choices"][0]["logprobs"] is None


def test_an_impossible_log_probability_is_still_json(client):
    body = {"temperature": 0, "max_tokens": 2, "logprobs": 0, "logit_bias": {"65": 100}}
    response = complete(client, **body)
    json.loads(response.content, parse_constant=pytest.fail)
    assert response.json()["choices"][0]["text"] == "AA"


# -- drafting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metrics", ["none", "summary", "detailed"])
def test_what_an_answer_says_of_drafting(metrics):
    with serving(a_server(singer(), per_request_spec_decode_metrics=metrics)) as client:
        body = {"temperature": 0, "max_tokens": 40, "n": 2}
        answer = complete(client, **body).json()
        chunks = events(complete(client, **body, stream=True, stream_options={"include_usage": True}))
    if metrics == "none":
        assert "metrics" not in answer and "metrics" not in chunks[-1]
        return
    block = answer["metrics"]["speculative_decoding"]
    assert chunks[-1]["metrics"]["speculative_decoding"] == block
    assert block["num_accepted_draft_tokens"] > 0
    assert block["mean_acceptance_length"] == 1 + block["num_accepted_draft_tokens"] / block["num_spec_steps"]
    assert sum(i * count for i, count in enumerate(block["acceptance_histogram"])) == block["num_accepted_draft_tokens"]
    assert ("per_step_accepted" in block) == (metrics == "detailed")


def test_a_prediction_is_drafted_from():
    """The prompt says nothing of the answer; without the prediction there is nothing to copy."""
    prediction = {"type": "content", "content": PHRASE * 2}
    with serving(a_server(singer())) as client:
        body = {"temperature": 0, "max_tokens": 16, "prompt": "z"}
        plain, helped = (complete(client, **body, **more).json() for more in ({}, {"prediction": prediction}))
    assert plain["choices"] == helped["choices"]
    accepted = [one["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] for one in (plain, helped)]
    assert accepted[0] < accepted[1]


# -- the other routes ------------------------------------------------------------------------------------------------


def test_models(client):
    (card,) = client.get("/v1/models").json()["data"]
    assert card["id"] == "pilot" and card["max_model_len"] == 512 and card["object"] == "model"
    assert client.get("/v1/models/pilot").json() == card
    assert client.get("/v1/models/other").status_code == 404


def test_tokenize(client):
    answer = client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    assert answer == {
        "count": 3,
        "max_model_len": 512,
        "tokens": list("hé".encode()),
        "token_strs": ["h", r"bytes:\xc3", r"bytes:\xa9"],
    }
    assert client.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"] == TOKENIZER.chat(MESSAGES)


def test_health_and_the_api_s_description(client):
    for path in ("/health", "/health/live", "/health/ready"):
        assert client.get(path).status_code == 200
    document = client.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/metrics"} <= document["paths"].keys()
    assert "temperature" in document["components"]["schemas"]["Chat"]["properties"]
    references = [part.split('"')[0] for part in json.dumps(document).split('"#/components/schemas/')[1:]]
    assert set(references) <= document["components"]["schemas"].keys()

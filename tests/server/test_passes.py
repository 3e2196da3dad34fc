"""Traces: they add up to the text and to the counters, and whoever does not ask for one gets nothing of it."""

import pytest

from pilotfish.server.passes import plain_seconds
from tests.server.fakes import MESSAGES, PHRASE, TOKENIZER, a_server, an_llm, events, joined, serving, singer, table

TRACE = {"stream": True, "stream_options": {"include_usage": True}, "pilotfish": {"trace": True}}
KEYS = {"tokens", "pieces", "num_accepted", "draft", "seconds", "pass_seconds", "plain_seconds"}
SHAPES = {
    "greedy": {"temperature": 0},
    "a stop string": {"temperature": 0, "stop": "🐠aéb€c🐠aéb"},
    "seeded, several": {"seed": 5, "n": 2},
    "token by token": {"temperature": 0, "stream_granularity": "token"},
    "with log-probabilities": {"temperature": 0, "logprobs": True},
}


def passes_of(chunks, index=0):
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return [choice["pilotfish"] for choice in choices if "pilotfish" in choice]


@pytest.fixture(scope="module", params=["ngram", "suffix", "first_of"])
def client(request):
    llm = {"method": request.param, "num_speculative_tokens": 6}
    with serving(a_server(singer(context=512), llm=llm)) as client:
        yield client


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_trace_adds_up(client, shape):
    body = {"messages": MESSAGES, "max_tokens": 60} | shape
    whole = client.post("/v1/chat/completions", json=body).json()
    chunks = events(client.post("/v1/chat/completions", json=body | TRACE))
    drafted = accepted = num_tokens = 0
    for choice in whole["choices"]:
        passes = passes_of(chunks, choice["index"])
        assert "".join("".join(one["pieces"]) for one in passes) == choice["message"]["content"]
        assert joined(chunks, choice["index"]) == choice["message"]["content"]
        assert len(passes) < sum(len(one["tokens"]) for one in passes)
        for one in passes:
            assert set(one) == KEYS
            assert one["plain_seconds"] is None and one["pass_seconds"] > 0
            num_tokens += len(one["tokens"])
            accepted += one["num_accepted"]
            if one["draft"] is None:
                assert one["num_accepted"] == 0
                continue
            assert one["draft"]["method"] in ("ngram", "suffix")
            path = [i for i, kept in enumerate(one["draft"]["accepted"]) if kept]
            assert [one["draft"]["tokens"][node] for node in path] == one["tokens"][: one["num_accepted"]]
            assert [one["draft"]["parents"][node] for node in path] == [-1, *path][: len(path)]
            drafted += len(one["draft"]["tokens"])
    counted = chunks[-1]["metrics"]["speculative_decoding"]
    assert drafted == counted["num_draft_tokens"] > 0
    assert accepted == counted["num_accepted_draft_tokens"] > 0
    assert num_tokens == chunks[-1]["usage"]["completion_tokens"]


def test_tokens_are_spelt_as_in_log_probabilities(client):
    body = {"messages": MESSAGES, "max_tokens": 20, "temperature": 0, "logprobs": True}
    chunks = events(client.post("/v1/chat/completions", json=body | TRACE))
    listed = [choice["logprobs"]["content"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    entries = [entry["token"] for content in listed for entry in content]
    assert [token for one in passes_of(chunks) for token in one["tokens"]] == entries
    assert "bytes:\\xe2" in entries  # of the euro sign, whose text comes with its last byte
    assert PHRASE in joined(chunks)


def test_a_branching_draft_is_a_tree():
    with serving(a_server(table(context=512), llm={"method": "suffix", "num_speculative_tokens": 12})) as client:
        body = {"prompt": "abcabdabeabf" * 4, "max_tokens": 150, "seed": 1, "temperature": 0.8, "ignore_eos": True}
        passes = passes_of(events(client.post("/v1/completions", json=body | TRACE)))
    parents = [one["draft"]["parents"] for one in passes if one["draft"]]
    assert any(len(set(own)) < len(own) for own in parents)


@pytest.mark.parametrize("pilotfish", [None, {}, {"trace": False}, {"trace": None}], ids=str)
def test_without_a_trace_there_is_nothing_of_it(client, pilotfish):
    body = {"messages": MESSAGES, "max_tokens": 20, "temperature": 0, "stream": True, "pilotfish": pilotfish}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200 and '"pilotfish"' not in response.text
    assert '"pilotfish"' in client.post("/v1/chat/completions", json=body | TRACE).text


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"pilotfish": {"trace": True}}, "pilotfish.trace needs stream: true"),
        ({"pilotfish": {"trace": True}, "stream": False}, "pilotfish.trace needs stream: true"),
        ({"pilotfish": {"race": True}, "stream": True}, "pilotfish.race: unknown field"),
        ({"pilotfish": {"trace": "yes"}, "stream": True}, "pilotfish.trace: input should be a valid boolean"),
        ({"pilotfisch": {"trace": True}, "stream": True}, "'pilotfisch'"),
    ],
)
def test_what_cannot_be_traced_is_refused(client, asked, told):
    response = client.post("/v1/chat/completions", json={"messages": MESSAGES} | asked)
    assert response.status_code == 400
    assert told in response.json()["error"]["message"]


def test_plain_speed_is_the_controllers():
    """Known where lengths are chosen by costs; of a whole batch, which shares a pass."""
    llm = an_llm(singer(), num_speculative_tokens="auto")
    assert plain_seconds(llm.engine, 3) == llm.engine.controller.costs.seconds(3) > 0
    assert plain_seconds(an_llm(singer()).engine, 1) is None
    with serving(a_server(singer(), llm={"num_speculative_tokens": "auto"})) as client:
        chunks = events(client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 20} | TRACE))
    assert all(one["plain_seconds"] > 0 for one in passes_of(chunks))


def test_times_are_of_the_completion_and_of_the_pass():
    """The first tokens took as long as the prompt and the queue; others as long as their pass, or longer."""
    with serving(a_server(singer())) as client:
        body = {"prompt": TOKENIZER.encode("hello"), "max_tokens": 30, "temperature": 0}
        passes = passes_of(events(client.post("/v1/completions", json=body | TRACE)))
    assert len(passes) > 3
    assert all(one["seconds"] >= one["pass_seconds"] - 1e-5 for one in passes)

"""The form of an answer through the server: every spelling, the same text with and without drafts, and refusals."""

import asyncio
import json

import pytest

from pilotfish.decoding.grammar import StructuredOutputsParams
from pilotfish.decoding.sampling import SamplingParams
from pilotfish.models import grammar_trial
from pilotfish.server.protocol import Chat, Text
from tests.server.fakes import MESSAGES, Caller, a_server, events, expected, joined, running, serving, table

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2, 30]}, "b": {"type": "boolean"}}, "required": ["a", "b"],
          "additionalProperties": False}  # fmt: skip
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SPELLINGS = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
     {"json": SCHEMA}),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"guided_json": SCHEMA}, {"json": SCHEMA}),
    ({"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": ""}, {"json": SCHEMA, "whitespace_pattern": ""}),
    ({"guided_regex": "ab+"}, {"regex": "ab+"}),
    ({"guided_choice": ["x", "yy"]}, {"choice": ["x", "yy"]}),
    ({"guided_grammar": 'start: "a" | "b" start'}, {"grammar": 'start: "a" | "b" start'}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
    ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    ({"structured_outputs": {"regex": "ab+"}}, {"regex": "ab+"}),
    ({"structured_outputs": {"choice": ["x"]}}, {"choice": ["x"]}),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "guided_json": None}, None),
]  # fmt: skip


@pytest.mark.parametrize(("body", "wanted"), SPELLINGS, ids=range(len(SPELLINGS)))
def test_every_spelling_is_understood(body, wanted):
    for asked in (Text.read({"prompt": "x"} | body), Chat.read({"messages": MESSAGES} | body)):
        found = asked.params(5).structured_outputs
        assert found == (wanted and StructuredOutputsParams(**wanted))


@pytest.fixture(scope="module")
def client():
    with serving(a_server(table(context=512))) as client:
        yield client


def post(client, path=TEXT, **body):
    return client.post(path, json=({"prompt": "hello"} if path == TEXT else {"messages": MESSAGES}) | body)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("body", [SPELLINGS[0][0], SPELLINGS[4][0], SPELLINGS[6][0]], ids=range(3))
def test_answers_have_the_form_and_are_the_library_s_plain_ones(client, body, temperature):
    shape = {"temperature": temperature, "seed": 7, "max_tokens": 200, "n": 2}
    wish = Text.read({"prompt": "x"} | body).params(5).structured_outputs
    params = SamplingParams(**shape, structured_outputs=wish)
    plain = [one.text for one in expected("hello", params, table(context=512))]
    choices = post(client, **shape, **body).json()["choices"]
    assert [choice["text"] for choice in choices] == plain
    chunks = events(post(client, **shape, **body, stream=True))
    assert [joined(chunks, i) for i in range(2)] == plain
    for choice in choices:
        if choice["finish_reason"] == "stop" and "response_format" in body:
            found = json.loads(choice["text"])
            assert found["a"] in (1, 2, 30) and isinstance(found["b"], bool) and len(found) == 2
    assert {choice["finish_reason"] for choice in choices} <= {"stop", "length"}


def test_a_chat_may_have_a_form_and_log_probabilities(client):
    (choice,) = post(client, CHAT, guided_choice=["yes", "no"], logprobs=True, seed=1).json()["choices"]
    assert choice["message"]["content"] in ("yes", "no") and choice["finish_reason"] == "stop"
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == choice["message"]["content"]


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"guided_regex": "("}, "guided_regex", "guided_regex: this regex cannot be used"),
        ({"guided_regex": r"[^\s\S]"}, "guided_regex", "admits no text"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "not json and regex"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx", "unknown field"),
        ({"guided_json": {"type": "object", "properties": {"a": False}, "required": ["a"]}}, "guided_json", "Unsatisf"),
        ({"guided_json": "{"}, "guided_json", "no JSON schema"),
        ({"guided_json": {"not": {}}}, "guided_json", 'Unimplemented keys: ["not"]'),
        ({"guided_regex": "a", "guided_json": {}}, "guided_json", "guided_json and guided_regex: give one"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "goes with guided_json"),
        ({"guided_choice": []}, "guided_choice", "at least 1 item"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs a schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'text', 'json_object' or 'json_schema'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "what"}}}},
         "response_format", "response_format: this json cannot be used: Invalid type: what"),
        ({"guided_regex": "a" * 200_000}, "guided_regex", "characters"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_cannot_be_used_is_a_400_with_the_reason(client, body, param, told):
    for path in (TEXT, CHAT):
        for stream in (False, True):
            response = post(client, path, stream=stream, **body)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["param"] == param and told in error["message"], error


def test_a_schema_that_takes_for_ever_holds_up_nobody_else(monkeypatch):
    monkeypatch.setattr(grammar_trial, "SECONDS", 1.5)
    exploding = {"allOf": [{"pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(5, 30)], "type": "string"}

    async def play():
        async with running(a_server(table())) as server:
            slow = Caller(server, TEXT, {"prompt": "x", "guided_json": exploding})
            quick = Caller(server, TEXT, {"prompt": "x", "max_tokens": 3})
            waiting = asyncio.create_task(slow.run())
            await asyncio.sleep(0.05)
            await quick.run()
            assert not waiting.done() and quick.status == 200
            await waiting
            assert slow.status == 400 and "takes longer than 1.5 s" in slow.text

    asyncio.run(play())


def test_the_openapi_document_has_the_new_fields(client):
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    assert {"response_format", "structured_outputs", "guided_json", "tools", "tool_choice"} <= set(
        schemas["Chat"]["properties"]
    )
    assert "schema" in schemas["JsonSchema"]["properties"] and "json" in schemas["StructuredOutputs"]["properties"]


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_form_that_is_complete_ends_before_min_tokens(client, temperature):
    """Nothing else can follow, even where the end is a token that min_tokens forbids."""
    for form, text in (
        ({"guided_regex": "ab"}, "ab"),
        ({"guided_json": {"const": 1}}, "1"),
        ({"guided_choice": ["xy"], "stop_token_ids": [ord("y")]}, "x"),
    ):
        asked = {"min_tokens": 9, "max_tokens": 40, "temperature": temperature, "seed": 3}
        (choice,) = post(client, **asked, **form).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")


def test_min_tokens_holds_where_a_form_can_go_on(client):
    """Negative control of the above."""
    for seed in range(5):
        answer = post(client, guided_regex="a*", min_tokens=9, max_tokens=40, seed=seed).json()
        assert len(answer["choices"][0]["text"]) >= 9
    short = [
        len(post(client, guided_regex="a*", max_tokens=40, seed=seed).json()["choices"][0]["text"]) for seed in range(9)
    ]
    assert min(short) < 9

"""Tool calls: read out of texts however they are cut, insisted on, streamed, and told to the model."""

import json
import random

import pytest

from pilotfish.decoding.grammar import StructuredOutputsParams
from pilotfish.errors import ModelError
from pilotfish.models.tokenizer import Tokenizer
from pilotfish.server.messages import Message, turns
from pilotfish.server.refusals import Refusal
from pilotfish.server.tools import CallReader, Tool, call_grammar, joined
from tests.models.test_grammars import GRAMMARS, admits
from tests.models.test_tokenizer import byte_level
from tests.server.fakes import MESSAGES, TOKENIZER, a_server, events, serving, singer, table

ROME = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'
TRICKY = '<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>\\"{", "b": {"c": [{}]}}}</tool_call>'
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place ::= now",
        "parameters": {"type": "object", "properties": {"place": {"$ref": "#/$defs/p"}}, "required": ["place"],
                       "additionalProperties": False, "$defs": {"p": {"enum": ["Rome", "Oslo"]}}},
    },
}  # fmt: skip
CLOCK = {"type": "function", "function": {"name": "clock"}}


def read(pieces):
    """(content, [(name, arguments)], the deltas)."""
    reader, content, calls, deltas = CallReader(), "", [], []
    for i, piece in enumerate(pieces):
        delta = reader.feed(piece, last=i == len(pieces) - 1)
        content += delta.get("content", "")
        joined(calls, delta.get("tool_calls", []))
        deltas.append(delta)
    return content, [(call["function"]["name"], call["function"]["arguments"]) for call in calls], deltas


TEXTS = [
    ("", "", []),
    ("no call at all, a < b\n", "no call at all, a < b\n", []),
    (ROME, "", [("weather", '{"place": "Rome"}')]),
    (f"Let me see.\n{ROME}", "Let me see.", [("weather", '{"place": "Rome"}')]),
    (f"{ROME}\n{TRICKY}\n", "", [("weather", '{"place": "Rome"}'),
                                 ("f", '{"a": "}</tool_call>\\"{", "b": {"c": [{}]}}')]),
    (f"a \n b\n{ROME}\nc \n d\n{ROME}", "a \n bc \n d", [("weather", '{"place": "Rome"}')] * 2),
    (f"{ROME}\nDone <to", "Done <to", [("weather", '{"place": "Rome"}')]),
    ('<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>', "", [("g", '{"x": 1}')]),
    ('<tool_call>{"name": "g"}</tool_call>', "", [("g", "{}")]),
    ('<tool_call>{"name": "g", "parameters": {"é": "🐠"}}</tool_call>', "", [("g", '{"é": "🐠"}')]),
    ("x \n<tool_call>rubbish</tool_call> and more", "x \n<tool_call>rubbish</tool_call> and more", []),
    ("x \n<tool_call>rub", "x \n<tool_call>rub", []),
    ('<tool_call>{"name": "a b"}</tool_call>', '<tool_call>{"name": "a b"}</tool_call>', []),
    ('<tool_call>{"name": "g", "arguments": 5}</tool_call>',
     '<tool_call>{"name": "g", "arguments": 5}</tool_call>', []),
    ("<tool_call>" + "[" * 5000, "<tool_call>" + "[" * 5000, []),
    ('<tool_call>\n{"name": "g", "argu', '<tool_call>\n{"name": "g", "argu', []),
    ('<tool_call>{"arguments": {}, "name": "g"}', "", [("g", "{}")]),  # the text ended, and with it the call
    ('<tool_call>{"name": "g", "arguments": {"x": [1, "', "", [("g", '{"x": [1, "')]),  # max_tokens
    ('<tool_call>{"name": "g", "arguments": {}}\n', "", [("g", "{}")]),
    ('<tool_call>{"name": "g", "arguments": {}}\nand', "and", [("g", "{}")]),  # the tag is missing
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "calls"), TEXTS, ids=range(len(TEXTS)))
def test_what_is_read_does_not_depend_on_how_the_text_comes(text, content, calls):
    assert read([text])[:2] == (content, calls)
    chance = random.Random(0)
    for size in (1, 2, 3, 7):
        pieces, left = [], text
        while left:
            cut = size if size == 1 else chance.randint(1, 2 * size)
            pieces.append(left[:cut])
            left = left[cut:]
        for cuts in (pieces, [*pieces, ""]):
            assert read(cuts or [""])[:2] == (content, calls)


def test_arguments_come_as_they_are_written():
    """Letter by letter, nothing of the arguments is held back."""
    deltas = read(list(ROME))[2]
    sent = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", [])]
    assert "".join(sent) == '{"place": "Rome"}' and len(sent) == len('{"place": "Rome"}')
    first = next(delta for delta in deltas if delta)["tool_calls"][0]
    assert first["function"]["name"] == "weather" and first["id"].startswith("call_") and first["type"] == "function"
    assert not any("content" in delta for delta in deltas)


def test_content_is_held_back_only_where_a_call_may_begin():
    reader = CallReader()
    assert reader.feed("a <b") == {"content": "a <b"}
    assert reader.feed(" <tool") == {}
    assert reader.feed("s>") == {"content": " <tools>"}
    assert reader.feed("\n") == {}
    assert reader.feed("", last=True) == {"content": "\n"}


# -- what a client insists on ----------------------------------------------------------------------------------------


def a_tool(raw):
    return Tool.model_validate(raw)


def test_a_call_that_is_insisted_on_has_a_grammar():
    several = call_grammar([a_tool(WEATHER), a_tool(CLOCK)], several=True)
    clock = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    assert admits(several, ROME) and admits(several, f"{ROME}\n{clock}\n{ROME}") and admits(several, clock)
    for wrong in (
        "hello",
        ROME.replace("Rome", "Bonn"),
        ROME.replace("weather", "clock"),
        ROME[:-1],
        f"{ROME} {clock}",
    ):
        assert not admits(several, wrong)
    one = call_grammar([a_tool(WEATHER)], several=False)
    assert admits(one, ROME) and not admits(one, f"{ROME}\n{ROME}") and not admits(one, clock)
    assert isinstance(one, StructuredOutputsParams)


def test_parameters_are_an_object():
    with pytest.raises(Refusal, match="tools.0.function.parameters: its type must be object, not 'string'"):
        call_grammar([a_tool({"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}})],
                     several=False)  # fmt: skip
    open_ended = a_tool({"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}}}}})
    grammar = call_grammar([open_ended], several=False)
    assert admits(grammar, '<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>')
    GRAMMARS.prepare(grammar)


# -- through the server ----------------------------------------------------------------------------------------------


def ask(client, **body):
    return client.post(
        "/v1/chat/completions", json={"messages": MESSAGES, "tools": [WEATHER, CLOCK], "temperature": 0} | body
    )


def speaker(text):
    """A model that says this text and ends, whatever stands before it."""
    model = singer(context=1024)
    words = [*text.encode(), 256]

    def logits_of(seen, *, whole=True):
        prompt = len(TOKENIZER.chat(MESSAGES, [WEATHER, CLOCK]))
        row = model.table[0, 0] * 0
        row[words[min(max(0, len(seen) - prompt), len(words) - 1)]] = 30
        return row

    model.logits_of = logits_of
    return model


@pytest.mark.parametrize("granularity", ["run", "token"])
def test_calls_that_the_model_makes_are_read_whole_and_streamed(granularity):
    text = f"Hm.\n{ROME}\n{ROME.replace('Rome', 'Oslo')}"
    with serving(a_server(speaker(text))) as client:
        (choice,) = ask(client, max_tokens=300).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert message["content"] == "Hm."
        assert [call["function"] for call in message["tool_calls"]] == [
            {"name": "weather", "arguments": '{"place": "Rome"}'},
            {"name": "weather", "arguments": '{"place": "Oslo"}'},
        ]
        assert len({call["id"] for call in message["tool_calls"]}) == 2
        chunks = events(ask(client, max_tokens=300, stream=True, stream_granularity=granularity))
        content, calls = "", []
        for delta in (chunk["choices"][0]["delta"] for chunk in chunks):
            content += delta.get("content", "")
            joined(calls, delta.get("tool_calls", []))
        assert content == "Hm." and [call["function"] for call in calls] == [
            call["function"] for call in message["tool_calls"]
        ]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        assert not any(chunk["choices"][0]["delta"] == {} for chunk in chunks[:-1])
        # With tool_choice none nobody reads the text.
        assert ask(client, max_tokens=300, tool_choice="none").json()["choices"][0]["message"]["content"] is not None


def test_without_parallel_calls_the_first_is_the_last_word():
    with serving(a_server(speaker(f"{ROME}\n{ROME}"))) as client:
        (choice,) = ask(client, max_tokens=300, parallel_tool_calls=False).json()["choices"]
        assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_a_call_that_is_insisted_on_is_made_by_any_model(method):
    with serving(a_server(table(context=1024), llm={"method": method})) as client:
        for body in (
            {"tool_choice": "required"},
            {"tool_choice": "required", "parallel_tool_calls": False},
            {"tool_choice": {"type": "function", "function": {"name": "clock"}}},
        ):
            choices = ask(client, **body, temperature=1, seed=4, n=2, max_tokens=200).json()["choices"]
            for choice in choices:
                if choice["finish_reason"] == "length":  # it went on and on; what it began is there
                    continue
                assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
                for call in choice["message"]["tool_calls"]:
                    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
                    assert arguments in ([{}] if name == "clock" else [{"place": "Rome"}, {"place": "Oslo"}])
                    assert name == "clock" or isinstance(body["tool_choice"], str)


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required'"),
        ({"tool_choice": {"type": "function", "function": {"name": "wether"}}}, "tool_choice", "mean 'weather'"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "no tools to choose from"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type", "'function'"),
        ({"response_format": {"type": "json_object"}}, "response_format", "tool_choice: none"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties":
         {"a": {"type": "what"}}}}}], "tool_choice": "required"}, "tools", "what"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages.0.tool_call_id", "role tool"),
        ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages.0.content", "needs a text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f",
         "arguments": "[1]"}}]}]}, "messages.0.tool_calls.0.function.arguments", "JSON object"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f",
         "arguments": '{"a": "\\ud800"}'}}]}]}, "messages.0.tool_calls.0.function.arguments", "JSON object"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_mistakes_are_named(body, param, told):
    with serving(a_server(table())) as client:
        response = ask(client, **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param and told in response.json()["error"]["message"]


def test_a_model_whose_template_knows_no_tools_is_not_given_any():
    tokenizer = byte_level()
    tokenizer.hf.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert tokenizer.chat(MESSAGES)
    with pytest.raises(ModelError, match="knows no tools"):
        tokenizer.chat(MESSAGES, [WEATHER])
    tokenizer.hf.chat_template = "{{ tools | tojson if tools }}" + tokenizer.hf.chat_template
    assert "weather" in tokenizer.decode(tokenizer.chat(MESSAGES, [WEATHER]))


def test_a_conversation_with_calls_goes_through_the_template():
    """An answer of ours is sent back as it came."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Rome"}'}}
    raw = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    said = turns([Message.model_validate(message) for message in raw])
    assert said[1]["tool_calls"][0]["function"]["arguments"] == {"place": "Rome"}
    assert said[1]["content"] == "" and said[2] == {"role": "tool", "content": "sunny", "tool_call_id": "call_1"}
    tokenizer: Tokenizer = byte_level()
    tokenizer.hf.chat_template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.place }}"
        "{% endfor %}{{ m.content }};{% endfor %}"
    )
    assert tokenizer.decode(tokenizer.chat(said)) == "weather?;weatherRome;sunny;"

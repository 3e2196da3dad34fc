"""Grammars by way of llguidance: what is compiled, what is refused and why, limits of time and size, tokenizers."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from transformers import AddedToken

from pilotfish.decoding.grammar import StructuredOutputsParams
from pilotfish.errors import ModelError, OptionError
from pilotfish.models import grammar_trial
from pilotfish.models.grammars import MOST_CHARACTERS, Grammars
from tests.fakes import ByteTokenizer
from tests.models.test_tokenizer import byte_fallback, byte_level, metaspace

BYTES = ByteTokenizer()
GRAMMARS = Grammars(BYTES, 260)  # three rows more than tokens, as models are padded
EXPLODING = {"allOf": [{"pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(5, 30)], "type": "string"}


def admits(wanted, text, grammars=GRAMMARS):
    """Whether the whole text is admitted, and nothing of it forbidden on the way."""
    matcher = grammars.matcher(wanted)
    for token in grammars.tokenizer.encode(text):
        if not bool(matcher.allowed()[token]) or not matcher.take(token):
            return False
    return matcher.accepting


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        ({"json": {"type": "integer"}}, ["12", "-3"], ["1.5", "x", ""]),
        ({"json": {"items": {"enum": ["a", "ü"]}, "type": "array"}}, ['["a"]', '[ "ü", "a" ]'], ['["b"]']),
        ({"json": {}}, ["null", '{"a": [1, {}]}'], ["nul", "{a: 1}"]),
        ({"json": True}, ["[]"], ["["]),
        ({"json_object": True}, ["{}", '{"a": null}'], ["[]", "1"]),
        ({"json_object": True, "whitespace_pattern": ""}, ['{"a":1}'], ['{"a": 1}']),
        ({"regex": "a+|é🐠"}, ["aaa", "é🐠"], ["b", "é"]),
        ({"choice": ["a\nb", 'q"\\', "\x7f", "ab", "a"]}, ["a\nb", 'q"\\', "\x7f", "a", "ab"], ["b", "a\n"]),
        ({"grammar": 'start: "a" b*\nb: "b" | "(" start ")"'}, ["a", "ab(ab)b"], ["b", "a("]),
        ({"grammar": 'root ::= "a" [0-9]+'}, ["a12"], ["a"]),
    ],
)  # fmt: skip
def test_what_is_admitted(wanted, good, bad):
    wanted = StructuredOutputsParams(**wanted)
    assert all(admits(wanted, text) for text in good)
    assert not any(admits(wanted, text) for text in bad)


def test_take_and_undo_and_copy():
    matcher = GRAMMARS.matcher(StructuredOutputsParams(regex="abc|abd"))
    assert all(map(matcher.take, b"ab"))
    other = matcher.copy()
    before = matcher.allowed()
    assert matcher.take(ord("c")) and matcher.accepting and not bool(matcher.allowed().any())
    assert not matcher.take(ord("c")) and not matcher.take(BYTES.eos), "an end is not the grammar's business"
    matcher.undo()
    assert torch.equal(matcher.allowed(), before) and torch.equal(other.allowed(), before)
    assert not matcher.take(258), "a row without a token"


def test_masks_are_as_long_as_the_model_s_rows():
    wanted = StructuredOutputsParams(regex=r"[\s\S]*")
    for num_ids in (300, 257, 200):
        grammars = Grammars(BYTES, num_ids)
        row_V = grammars.matcher(wanted).allowed()
        assert len(row_V) == num_ids and not bool(row_V[256:].any()) and bool(row_V[:128].all())


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"regex": r"[^\s\S]"}, "it admits no text"),
        ({"regex": ""}, "admits no text but the empty one"),
        ({"choice": [""]}, "admits no text but the empty one"),
        ({"json": False}, "false admits nothing"),
        ({"json": {"type": "object", "properties": {"a": False}, "required": ["a"]}}, "Unsatisfiable"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "cannot be used"),
        ({"json": {"type": "nonsense"}}, "nonsense"),
        ({"json": {"not": {}}}, 'Unimplemented keys: ["not"]'),
        ({"json": {"$ref": "http://localhost/x"}}, "cannot be used"),
        ({"grammar": "garbage ]["}, "cannot be used"),
        ({"grammar": 'start: "a" start'}, "cannot be used"),
        ({"grammar": "start: " + "(" * 50_000}, "too deeply nested"),
        ({"regex": "a" * (MOST_CHARACTERS + 1)}, f"{MOST_CHARACTERS + 1} characters; at most {MOST_CHARACTERS}"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_refused_and_why(wanted, told):
    for _ in range(2):  # the second time from memory
        with pytest.raises(OptionError) as caught:
            GRAMMARS.prepare(StructuredOutputsParams(**wanted))
        assert told in str(caught.value) and str(caught.value).startswith("structured_outputs: ")
        assert len(str(caught.value)) < 500


def test_a_grammar_that_takes_for_ever_is_given_up_and_the_next_one_is_fine(monkeypatch):
    monkeypatch.setattr(grammar_trial, "SECONDS", 0.6)
    grammars = Grammars(BYTES, 257)
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(OptionError, match="takes longer than 0.6 s"):
            grammars.prepare(StructuredOutputsParams(json=EXPLODING))
    assert time.monotonic() - started < 0.3, "what was refused is remembered"
    grammars.prepare(StructuredOutputsParams(regex="a"))


def test_a_worker_that_dies_is_replaced():
    process = grammar_trial._worker._process
    assert grammar_trial.try_out(_regex("x")) == ""
    grammar_trial._worker._process.kill()
    grammar_trial._worker._process.wait()
    assert grammar_trial.try_out(_regex("y")) == ""
    assert grammar_trial._worker._process is not process


def _regex(text):
    return json.dumps({"grammars": [{"lark_grammar": f"start: /{text}/"}]})


def test_a_program_that_tried_a_grammar_ends():
    """The worker does not keep it alive, nor is it left behind."""
    program = (
        "from pilotfish.models import grammar_trial as t\n"
        f"print(repr(t.try_out({_regex('x')!r})), t._worker._process.pid)"
    )
    run = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    told, pid = run.stdout.split()
    assert told == "''" and run.stderr == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_tokenizers_of_hugging_face():
    wanted = StructuredOutputsParams(choice=["the a", "café"])
    for tokenizer, head in ((byte_level(), 0), (byte_fallback(), 1)):  # the latter begins each text with a space
        matcher = Grammars(tokenizer, len(tokenizer) + 5).matcher(wanted)
        ids = tokenizer.encode("café", add_special_tokens=False)[head:]
        assert all(bool(matcher.allowed()[token]) and matcher.take(token) for token in ids) and matcher.accepting
        assert not bool(matcher.allowed().any())
    with pytest.raises(ModelError, match="cannot read this tokenizer"):
        Grammars(metaspace(), 20).matcher(wanted)


def test_an_added_token_that_has_a_text_is_text():
    """Qwen's <tool_call>; special ones are not."""
    tokenizer = byte_level(["<call>"])
    name = AddedToken("<call>", special=False, normalized=False)
    tokenizer.hf.add_tokens([name])
    own = tokenizer.encode("<call>", add_special_tokens=False)
    assert len(own) == 1
    matcher = Grammars(tokenizer, len(tokenizer)).matcher(StructuredOutputsParams(grammar='start: "<call>x"'))
    allowed = matcher.allowed().nonzero().flatten().tolist()
    assert own[0] in allowed and all(matcher.copy().take(token) for token in allowed)
    matcher = Grammars(tokenizer, len(tokenizer)).matcher(StructuredOutputsParams(regex="[\\s\\S]*"))
    assert not bool(matcher.allowed()[[0, 1]].any())


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(OptionError, match=r"pip install 'pilotfish\[structured\]'"):
        Grammars(BYTES, 257).prepare(StructuredOutputsParams(regex="a"))

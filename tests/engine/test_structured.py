"""Structured output through the engine: the same text with any draft, alone or in company, and always a valid one."""

import json
import random
import re

import pytest
import torch

from pilotfish.decoding.draft import Draft, chain
from pilotfish.decoding.grammar import Constraint, StructuredOutputsParams
from pilotfish.decoding.request import FinishReason
from pilotfish.decoding.sampling import SamplingParams, process, warp
from pilotfish.drafters import registry
from pilotfish.errors import OptionError
from pilotfish.models.huggingface import HuggingFaceLM
from pilotfish.models.load import Loaded
from pilotfish.models.tokenizer import Detokenizer
from tests.adversaries import Scripted, guesser, method_config, random_trees, sampled_chain
from tests.fakes import ByteTokenizer, TableModel, drain, engine
from tests.models.tiny import tiny_model

TOKENIZER = ByteTokenizer(97, 32)  # printable ASCII; the last id ends the text
EOS = TOKENIZER.eos
TABLE = TableModel(97, order=1, num_phases=3, eos={EOS}, context=512)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob", "eve"]}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
WISHES = {
    "json": StructuredOutputsParams(json=SCHEMA, whitespace_pattern=" ?"),
    "regex": StructuredOutputsParams(regex="(yes|no|maybe)+(, (yes|no)){2,5}[!?]"),
    "choice": StructuredOutputsParams(choice=["one", "only", "other things"]),
    "grammar": StructuredOutputsParams(grammar='start: item ("," item)* "."\nitem: /[a-f]{1,3}/ | "(" item ")"'),
}
PROMPT = TOKENIZER.encode("hello")


def is_valid(kind, text):
    if kind == "json":
        found = json.loads(text)
        known = {"name": ("ada", "bob", "eve"), "ok": (True, False)}
        whole = isinstance(found.get("age", 0), int) and set(found) <= {*known, "age"}
        return whole and all(found[name] in values for name, values in known.items())
    if kind == "choice":
        return text in ("one", "only", "other things")
    if kind == "regex":
        return bool(re.fullmatch("(yes|no|maybe)+(, (yes|no)){2,5}[!?]", text))
    items = text.removesuffix(".").split(",")
    flat = all(item.count("(") == item.count(")") and re.fullmatch(r"\(*[a-f]{1,3}\)*", item) for item in items)
    return text.endswith(".") and flat


def along(wish, *, branches):
    """Texts that the grammar admits, and some that it does not: drafts that get far before they are wrong."""
    words = {"json": ['{"name":"bob","ok":true}', '{"name": "eve"'], "regex": ["yes, no, yes!", "maybemaybeyes"],
             "choice": ["only", "other thongs"], "grammar": ["(a),((b)).", "abc,abcd"]}[wish]  # fmt: skip
    ids = [TOKENIZER.encode(word) for word in words]

    def script(request, limit):
        done = TOKENIZER.decode(request.output)
        follow = [own[len(request.output) :] for own, word in zip(ids, words, strict=True) if word.startswith(done)]
        follow = [own for own in follow if own] or [[ord("(") - 32], [ord("a") - 32]]
        if not branches:
            return chain(follow[0][:limit])
        tokens, parents = [], []
        for own in follow:
            parent = -1
            for token in own[: limit // 2]:
                if (parent, token) in zip(parents, tokens, strict=True):
                    parent = list(zip(parents, tokens, strict=True)).index((parent, token))
                    continue
                tokens.append(token)
                parents.append(parent)
                parent = len(tokens) - 1
        return Draft(tuple(tokens[:limit]), tuple(parents[:limit]))

    return Scripted(script, trees=branches)


def drafters(wish):
    return {
        "random": guesser(97),
        "random trees": random_trees(97),
        "drawn": sampled_chain(TABLE.law),
        "drawn trees": random_trees(97, TABLE.law),
        "along": along(wish, branches=False),
        "along both": along(wish, branches=True),
    }


def texts(wish, drafter, params, batch=1, **more):
    """The texts of so many completions; (texts, accepted tokens)."""
    found = engine(TABLE, drafter, tokenizer=TOKENIZER, k=6, **more)
    requests = found.add(
        PROMPT, params(structured_outputs=WISHES[wish], n=batch), text_stream=lambda: Detokenizer(TOKENIZER)
    )
    drain(found)
    assert all(request.finish in (FinishReason.STOP, FinishReason.LENGTH) for request in requests), requests[0].error
    assert found.num_failed_drafts == 0
    ends = [request.finish is FinishReason.STOP for request in requests]
    accepted = sum(sum(request.stats.per_step_accepted) for request in requests)
    return [request.text for request in requests], ends, accepted


def seeded(**more):
    return SamplingParams(**{"seed": 3, "max_tokens": 44} | more)


def greedy(**more):
    return SamplingParams(**{"temperature": 0, "max_tokens": 44} | more)


def shaped(**more):
    return seeded(temperature=0.8, top_p=0.95, frequency_penalty=0.3, logit_bias={2: -2.0}, min_tokens=4, **more)


@pytest.mark.parametrize("params", [greedy, seeded, shaped])
@pytest.mark.parametrize("wish", WISHES)
def test_drafts_change_nothing_and_every_finished_text_is_valid(wish, params):
    plain, ends, _ = texts(wish, None, params, batch=8)
    assert any(ends)
    assert all(is_valid(wish, text) for text, ended in zip(plain, ends, strict=True) if ended), plain
    gained = 0
    for name, drafter in drafters(wish).items():
        batch = 8 if "tree" in name or "both" in name else 1
        found, _, accepted = texts(wish, drafter, params, batch)
        assert found == plain[:batch], name
        gained += accepted
    assert gained > 0, "nothing was ever accepted: the comparison says little"


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("wish", WISHES)
def test_without_a_seed_texts_are_valid_too(wish, rule):
    for name, drafter in drafters(wish).items():
        if rule == "block" and "tree" in name + "tree" * drafter.trees:
            continue
        found, ends, _ = texts(wish, drafter, lambda **more: SamplingParams(max_tokens=44, **more), 2, rule=rule)
        assert all(is_valid(wish, text) for text, ended in zip(found, ends, strict=True) if ended), (name, found)


def test_by_an_oracle_without_engine_or_drafts():
    """Token for token, from logits and a regex alone."""
    pattern = re.compile("(ab|ba)c{1,3}")
    whole = [a + "c" * n for a in ("ab", "ba") for n in (1, 2, 3)]
    output = []
    while True:
        text = TOKENIZER.decode(output)
        nexts = {one[len(text)] for one in whole if one.startswith(text) and len(one) > len(text)}
        if not nexts:
            break
        allowed = torch.zeros(1, 97, dtype=torch.bool)
        allowed[0, [ord(letter) - 32 for letter in nexts] + ([EOS] if text in whole else [])] = True
        logits = TABLE.logits_of([*PROMPT, *output])[None]
        output.append(int(process(logits, greedy(), PROMPT, [output], {EOS}, allowed)[0].argmax()))
        if output[-1] == EOS:
            break
    found = engine(TABLE, guesser(97), tokenizer=TOKENIZER)
    (request,) = found.add(PROMPT, greedy(structured_outputs=StructuredOutputsParams(regex=pattern.pattern)))
    drain(found)
    assert request.output == output


def test_masks_from_the_wrong_row_would_be_seen(monkeypatch):
    """Negative control: with every row masked as the pending one, drafts do change the text."""
    right = Constraint.masks
    plain, _, _ = texts("json", None, greedy)
    monkeypatch.setattr(Constraint, "masks", lambda self, draft: right(self, Draft()).expand(len(draft) + 1, -1))
    found, _, _ = _or_error(lambda: texts("json", along("json", branches=False), greedy))
    assert found != plain


def _or_error(run):
    try:
        return run()
    except AssertionError as error:
        return [str(error)], [], 0


def test_forbidden_nodes_are_not_even_fed():
    found = engine(TABLE, guesser(97), tokenizer=TOKENIZER, k=6)
    (request,) = found.add(PROMPT, greedy(structured_outputs=WISHES["choice"]))
    TABLE.num_rows = 0
    drain(found)
    assert TABLE.num_rows < len(PROMPT) + 2 * len(request.output)


def test_the_end_is_allowed_where_the_grammar_accepts_and_nowhere_else():
    eager = TableModel(97, order=1, eos={EOS})
    eager.table[:, :, EOS] += 50  # it would end at once
    for wish, text in [("a{3}", "aaa"), ("a{2,9}", "aa")]:
        found = engine(eager, tokenizer=TOKENIZER)
        wanted = StructuredOutputsParams(regex=wish)
        (request,) = found.add(PROMPT, greedy(structured_outputs=wanted), text_stream=lambda: Detokenizer(TOKENIZER))
        drain(found)
        assert request.text == text and request.finish is FinishReason.STOP
        (longer,) = found.add(PROMPT, greedy(structured_outputs=wanted, min_tokens=6, logprobs=2))
        drain(found)
        # The grammar's own end comes first; where the text may go on, it does until min_tokens.
        assert longer.num_output == (3 if wish == "a{3}" else 7)
        assert len(longer.logprobs) == longer.num_output
        (without,) = found.add(PROMPT, greedy(structured_outputs=wanted, ignore_eos=True))
        drain(found)
        assert without.num_output == (3 if wish == "a{3}" else 9)


def test_stop_strings_and_stop_ids_end_a_structured_text():
    wanted = StructuredOutputsParams(regex="(ab){5}")
    found = engine(TABLE, along("choice", branches=False), tokenizer=TOKENIZER)
    stream = {"text_stream": lambda: Detokenizer(TOKENIZER)}
    (request,) = found.add(PROMPT, greedy(structured_outputs=wanted, stop="bab"), **stream)
    drain(found)
    assert (request.text, request.stop_reason) == ("a", "bab")
    (request,) = found.add(PROMPT, greedy(structured_outputs=wanted, stop_token_ids=[ord("b") - 32]), **stream)
    drain(found)
    assert (request.text, request.stop_reason) == ("a", ord("b") - 32)


def test_log_probabilities_are_of_the_law_that_was_sampled_from():
    found = engine(TABLE, guesser(97), tokenizer=TOKENIZER)
    wanted = StructuredOutputsParams(choice=["a", "b"])
    (request,) = found.add(PROMPT, SamplingParams(seed=1, structured_outputs=wanted, logprobs=3))
    drain(found)
    raw = TABLE.logits_of(PROMPT)[[ord("a") - 32, ord("b") - 32]]
    law = torch.log_softmax(raw, 0).tolist()
    assert any(request.logprobs[0].logprob == pytest.approx(one, abs=1e-6) for one in law)
    (request,) = found.add(
        PROMPT, SamplingParams(seed=1, structured_outputs=wanted, logprobs=0, logprobs_mode="raw_logprobs")
    )
    drain(found)
    own = torch.log(warp(TABLE.logits_of(PROMPT)[None], SamplingParams())[0])[request.output[0]]
    assert request.logprobs[0].logprob == pytest.approx(float(own), abs=1e-6)


def test_one_request_s_grammar_is_nobody_else_s():
    found = engine(TABLE, guesser(97), tokenizer=TOKENIZER)
    free = greedy()
    (alone,) = found.add(PROMPT, free)
    drain(found)
    mixed = [found.add(PROMPT, greedy(structured_outputs=wish))[0] for wish in WISHES.values()]
    (beside,) = found.add(PROMPT, free)
    drain(found)
    assert beside.output == alone.output
    assert len({tuple(one.output) for one in mixed}) == len(mixed)


def test_preempted_requests_keep_their_place_in_the_grammar():
    plain, _, _ = texts("json", None, seeded, 6)
    tight, _, _ = texts("json", along("json", branches=True), seeded, 6, num_pages=40, max_num_seqs=6)
    assert tight == plain


def test_a_grammar_that_is_none_is_refused_before_anything_is_queued():
    found = engine(TABLE, tokenizer=TOKENIZER)
    with pytest.raises(OptionError, match="unclosed group"):
        found.add(PROMPT, greedy(structured_outputs=StructuredOutputsParams(regex="("), n=3))
    assert not found.has_work
    with pytest.raises(OptionError, match="need a tokenizer"):
        engine(TABLE).add(PROMPT, greedy(structured_outputs=WISHES["regex"]))


# -- every method of the package, and schemas at random --------------------------------------------------------------

SMALL = ByteTokenizer(64, 64)  # letters, and little else; the last id ends the text


def small_model(seed):
    return HuggingFaceLM(tiny_model(seed=seed))


@pytest.mark.parametrize("method", registry.methods())
def test_every_method_leaves_the_text_as_it_is(method):
    build = registry.parse(method_config(method, Loaded(small_model(1), SMALL))).build
    wishes = ["(ab|ba|b_{1,3}a)*x", "([a-e]{2}[f-h]){3,9}", "(yes|no|YES|NO)+"]
    found, plain = (engine(small_model(0), b, tokenizer=SMALL, k=4) for b in (build, None))
    for more in ({"temperature": 0}, {"seed": 2}):
        params = [
            SamplingParams(max_tokens=24, structured_outputs=StructuredOutputsParams(regex=wish), **more)
            for wish in wishes
        ]
        texts = []
        for one in (plain, found):
            requests = [one.add(SMALL.encode("ababab"), own)[0] for own in params]
            drain(one)
            texts.append([SMALL.decode(request.output) for request in requests])
        assert texts[0] == texts[1]
        assert all(re.fullmatch(wish, text) or len(text) >= 23 for wish, text in zip(wishes, texts[0], strict=True))
    assert found.num_failed_drafts == 0


def a_schema(chance, depth=0):
    """A JSON schema at random, whose texts are short."""
    kind = chance.choice(["enum", "integer", "boolean", "string", "null"] + ["object", "array", "anyOf"] * (depth < 2))
    if kind == "enum":
        return {"enum": chance.sample([1, -20, "a", "bc", 'q"', None, True, 1.5], chance.randint(1, 3))}
    if kind == "integer":
        low = chance.randint(-30, 30)
        return {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 50)}
    if kind == "string":
        low = chance.randint(0, 2)
        return {"type": "string", "minLength": low, "maxLength": low + chance.randint(0, 3)}
    if kind == "anyOf":
        return {"anyOf": [a_schema(chance, depth + 1) for _ in range(2)]}
    if kind == "array":
        low = chance.randint(0, 1)
        return {"type": "array", "items": a_schema(chance, depth + 1), "minItems": low, "maxItems": low + 2}
    if kind == "object":
        names = chance.sample(["a", "b", "long name", "c\\d"], chance.randint(0, 3))
        parts = {name: a_schema(chance, depth + 1) for name in names}
        required = [name for name in names if chance.random() < 0.6]
        return {"type": "object", "properties": parts, "required": required, "additionalProperties": False}
    return {"type": kind}


def follows(value, schema):
    """Whether a value is valid; for the schemas above."""
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    if "anyOf" in schema:
        return any(follows(value, arm) for arm in schema["anyOf"])
    kind = schema["type"]
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
    if kind == "array":
        sizes = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return sizes and all(follows(item, schema["items"]) for item in value)
    if kind == "object":
        if not isinstance(value, dict) or not set(schema["required"]) <= set(value) <= set(schema["properties"]):
            return False
        return all(follows(item, schema["properties"][name]) for name, item in value.items())
    return value is None if kind == "null" else isinstance(value, bool)


def check_schemas(seeds):
    """At temperature 1: every finished answer validates; with a seed, drafts change nothing. Returns how many ended."""
    plain = engine(TABLE, tokenizer=TOKENIZER)
    drafting = [
        engine(TABLE, drafter, tokenizer=TOKENIZER, k=5) for drafter in (random_trees(97, TABLE.law), guesser(97))
    ]
    num_ended = 0
    for seed in seeds:
        schema = a_schema(random.Random(seed))
        wanted = StructuredOutputsParams(json=schema, whitespace_pattern=" ?")
        texts = []
        for found, own in [(plain, seed), *((one, own) for one in drafting for own in (seed, None))]:
            params = SamplingParams(seed=own, max_tokens=150, structured_outputs=wanted)
            (request,) = found.add(PROMPT, params, text_stream=lambda: Detokenizer(TOKENIZER))
            drain(found)
            assert request.finish in (FinishReason.STOP, FinishReason.LENGTH), request.error
            if request.finish is FinishReason.STOP:
                num_ended += 1
                assert follows(json.loads(request.text), schema), (schema, request.text)
            if own is not None:
                texts.append(request.text)
        assert len(set(texts)) == 1, (schema, texts)
    return num_ended


def test_random_schemas():
    assert check_schemas(range(24)) > 24 * 5 * 0.8


@pytest.mark.slow
def test_many_random_schemas():
    assert check_schemas(range(1000, 1200)) > 200 * 5 * 0.8


def test_the_check_of_schemas_sees_a_wrong_value():
    """Negative control."""
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    assert follows({"a": 1}, schema)
    assert not any(follows(value, schema) for value in ({}, {"a": 2}, {"a": True}, {"a": 1, "b": 1}, []))

"""Names of conversations and their homes: stable, spread, and moved by no more than what changed."""

import json
from collections import Counter

import pytest

from pilotfish.scale.routing import conversation, home, refuges

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def name(path, **body):
    return conversation(path, json.dumps(body).encode())


def test_later_turns_have_the_same_name_and_other_conversations_another():
    system, hi = {"role": "system", "content": "s"}, {"role": "user", "content": "hi"}
    turns = [system, hi, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    assert name(CHAT, messages=turns[:2]) == name(CHAT, messages=turns, temperature=1, seed=5)
    others = [
        name(CHAT, messages=[hi]),
        name(CHAT, messages=[system, turns[3]]),
        name(CHAT, messages=turns, tools=[{"type": "function"}]),
        name(TEXT, prompt="hi"),
    ]
    assert len({name(CHAT, messages=turns), *others}) == 5


def test_prompts_that_grow_have_the_same_name():
    assert name(TEXT, prompt="x" * 300) == name(TEXT, prompt="x" * 300 + "more")
    assert name(TEXT, prompt=[[*range(70)]]) == name(TEXT, prompt=[*range(80)])
    assert name(TEXT, prompt="x" * 300) != name(TEXT, prompt="y" + "x" * 299)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b""),
        (CHAT, b"{"),
        (CHAT, b"[]"),
        (CHAT, b'{"messages": 5}'),
        (TEXT, b'{"prompt": []}'),
        ("/tokenize", b"{}"),
    ],
)
def test_what_is_no_conversation_has_no_name(path, body):
    assert conversation(path, body) is None


def test_homes_are_spread_and_few_move_when_a_replica_goes():
    names = [f"name {i}" for i in range(400)]
    before = {one: home(one, ["a", "b", "c", "d"]) for one in names}
    assert min(Counter(before.values()).values()) > 60
    after = {one: home(one, ["d", "c", "a"]) for one in names}
    assert all(after[one] == before[one] for one in names if before[one] != "b")


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ({"h": 3, "a": 0}, []),
        ({"h": 4, "a": 0, "b": 4}, ["a"]),
        ({"h": 4, "a": 4, "b": 9}, []),
        ({"h": 9, "a": 7, "b": None}, ["a", "b"]),
        ({"h": None, "a": 0}, []),
    ],
)
def test_a_home_is_left_only_where_one_would_wait_there_and_less_elsewhere(loads, expected):
    assert refuges(loads, "h", 4) == expected

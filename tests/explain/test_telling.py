"""What is told of a pass is what its record says, for every rule, in words and as a tree."""

from typing import Any

import pytest

from pilotfish.decoding.sampling import SamplingParams
from pilotfish.explain import telling
from pilotfish.explain.telling import (
    Line,
    balance,
    beginning,
    ending,
    gain,
    lines,
    number,
    rule_in_words,
    shown,
    totals,
)
from tests.adversaries import sampled_chain
from tests.test_trace import CASES, MODEL, Case, traced


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_tree_has_each_guess_once_below_its_parent(case: Case) -> None:
    for one in traced(case)[0]:
        found = lines(one)
        assert len(found) == len(one["nodes"]) + 2
        assert found[0] == Line("the text so far", -1, 0, "root")
        assert [line.parent < index for index, line in enumerate(found)] == [True] * len(found)
        own = next(line for line in found if line.fate == "own")
        assert own.text == shown(one["last"]["token"][1])
        ancestors, at = [], own.parent
        while at:
            ancestors.insert(0, found[at].text)
            at = found[at].parent
        assert ancestors == [one["draft"]["tokens"][node] for node in one["path"]]
        fates = [line.fate for line in found]
        assert fates.count("kept") == len(one["path"])
        assert fates.count("unseen") == len(one["nodes"]) - len(one["trials"])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_only_branches_are_indented(case: Case) -> None:
    for one in traced(case)[0]:
        found = lines(one)
        for index, line in enumerate(found[1:], start=1):
            siblings = [other for other in found[1:] if other.parent == line.parent]
            assert line.column == found[line.parent].column + (len(siblings) > 1), (index, found)


def test_coins_are_told_as_they_fell() -> None:
    for one in traced(CASES["rejection, drawn trees"])[0]:
        trials = {trial["node"]: trial for trial in one["trials"]}
        told = [line for line in lines(one) if line.mark is not None]
        assert sorted(line.mark for line in told) == sorted(t["u"] for t in trials.values() if "u" in t)
        for line in told:
            assert line.bar is not None and line.mark is not None
            assert (line.fate == "kept") == (line.mark < line.bar) == ("<" in line.why) == ("≥" not in line.why)


def test_a_block_s_failed_place_is_kept_when_a_later_one_succeeds() -> None:
    """The coin and the fate are two things there. Here the drafter is the target at another temperature."""
    case = (lambda: sampled_chain(MODEL.law), MODEL.law, SamplingParams(temperature=0.7, max_tokens=99), "block")
    seen = [line for one in traced(case)[0] for line in lines(one) if line.fate == "kept" and "≥" in line.why]
    assert seen and all(line.mark >= line.bar for line in seen if line.mark is not None and line.bar is not None)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_sentences_and_sums(case: Case) -> None:
    records, output = traced(case)
    sums = totals(records)
    assert (sums.num_tokens, sums.num_passes) == (len(output), len(records))
    assert sums.num_tokens == sums.num_kept + sums.num_passes - sum(len(r["ids"]) < len(r["path"]) + 1 for r in records)
    for index, one in enumerate(records):
        assert rule_in_words(one["rule"])
        assert shown(one["last"]["token"][1]) in ending(one)
        assert balance(records[: index + 1]).startswith(f"So far {one['num_output']} token")
        kept = one["num_accepted"]
        if len(one["ids"]) == kept + 1 > 1:
            assert gain(one) == f"{kept} kept + 1 of the target's own = {kept + 1} tokens for one pass."
        if one["nodes"]:
            how = "drawn from its law q" if one["drawn"] else "picked"
            num = len(one["nodes"])
            assert beginning(one).startswith(f"adversaries guessed {num} of at most {one['num_allowed']}")
            assert beginning(one).endswith(f"{how}.")


def pass_(**changes: Any) -> dict[str, Any]:
    return {"draft": None, "num_allowed": 4, "pass": 2, "nodes": []} | changes


def test_why_there_is_no_guess() -> None:
    assert beginning(pass_()) == "The drafter had no guess."
    assert beginning(pass_(num_allowed=0)) == "No guesses were allowed (K is 0 here)."
    assert "reads the prompt" in beginning(pass_(**{"pass": 1}))


def test_a_run_cut_by_the_end_of_the_text_says_what_counts() -> None:
    one = pass_(num_accepted=1, ids=[6], path=[0, 2], finish="stop")
    assert gain(one) == "The text ends inside this run (stop): 1 token count, the rest is thrown away."


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "1"), (0.0, "0.000"), (0.12345, "0.123"), (0.00012, "0.0001"), (3e-9, "3e-09"), (123.4, "123"), (None, "?")],
)
def test_numbers_keep_what_matters(value: float | None, text: str) -> None:
    assert number(value) == text


def test_spaces_and_ends_of_lines_are_seen() -> None:
    assert shown(" a\n\tb") == "·a⏎⇥b"
    assert len(shown("x" * 99)) == telling._LONGEST

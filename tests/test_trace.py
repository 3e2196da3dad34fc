"""Traces: a record recomputes its own verdict, a wrong one is found out, and nobody's text changes for being seen."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pilotfish.decoding.sampling import SamplingParams
from pilotfish.drafters.base import Drafter
from pilotfish.engine.engine import Engine
from pilotfish.errors import OptionError, PilotfishError
from pilotfish.trace import TraceFile, listen
from tests.adversaries import SlowStart, guesser, random_trees, sampled_chain
from tests.auditor import audit
from tests.fakes import ByteTokenizer, TableModel, drain, engine

NUM_IDS = 8
MODEL = TableModel(NUM_IDS, order=1, num_phases=3)
OTHER = TableModel(NUM_IDS, order=1, num_phases=3, seed=5, sharpness=1.0)
PROMPT = [3, 1]
GREEDY, SEEDED = SamplingParams(temperature=0, max_tokens=40), SamplingParams(seed=4, max_tokens=40)
SAMPLED = SamplingParams(temperature=0.7, max_tokens=40)
# name: (drafter, the law it draws from, how requests are sampled, the rule of requests without a seed)
Case = tuple[Callable[[], Drafter], Any, SamplingParams, str]
CASES: dict[str, Case] = {
    "greedy chains": (lambda: guesser(NUM_IDS), None, GREEDY, "rejection"),
    "greedy trees": (lambda: random_trees(NUM_IDS), None, GREEDY, "rejection"),
    "coupled chains": (lambda: guesser(NUM_IDS), None, SEEDED, "rejection"),
    "coupled trees": (lambda: random_trees(NUM_IDS), None, SEEDED, "rejection"),
    "rejection, chosen chains": (lambda: guesser(NUM_IDS), None, SAMPLED, "rejection"),
    "rejection, chosen trees": (lambda: random_trees(NUM_IDS), None, SAMPLED, "rejection"),
    "rejection, drawn chains": (lambda: sampled_chain(OTHER.law), OTHER.law, SAMPLED, "rejection"),
    "rejection, drawn trees": (lambda: random_trees(NUM_IDS, OTHER.law), OTHER.law, SAMPLED, "rejection"),
    "block, chosen": (lambda: guesser(NUM_IDS), None, SAMPLED, "block"),
    "block, drawn": (lambda: sampled_chain(OTHER.law), OTHER.law, SAMPLED, "block"),
    "plain": (lambda: sampled_chain(OTHER.law), None, SAMPLED, "plain"),
}


def an_engine(case: Case) -> Engine:
    drafter, _, _, rule = case
    if rule == "plain":
        return engine(MODEL, None, k=0)
    return engine(MODEL, drafter(), k=5, rule=rule)


def traced(case: Case) -> tuple[list[dict[str, Any]], list[int]]:
    """Records, as they are read back from JSON, and the output."""
    found, records = an_engine(case), list[dict[str, Any]]()
    listen(found, None, lambda one: records.append(json.loads(json.dumps(one, allow_nan=False))))
    (request,) = found.add(PROMPT, case[2])
    drain(found)
    return records, request.output


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_records_recompute_their_verdicts(case: Case) -> None:
    records, output = traced(case)
    text = list(PROMPT)
    for number, one in enumerate(records, start=1):
        audit(one, text, MODEL, case[1])
        text += one["ids"]
        assert (one["pass"], one["num_output"], one["num_prompt"]) == (number, len(text) - 2, 2)
        assert one["num_accepted"] == min(len(one["path"]), len(one["ids"]))
        assert one["draft"] is None or one["draft"]["method"] == "adversaries"
        assert len(one["nodes"]) <= one["num_allowed"] <= 5
    assert text[2:] == output and len(output) == 40
    assert records[-1]["finish"] == "length" and not any(one["finish"] for one in records[:-1])
    trials = [trial for one in records for trial in one["trials"]]
    if case[3] != "plain":
        assert {trial["passed"] for trial in trials} == {True, False}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_being_traced_changes_no_text(case: Case) -> None:
    found = an_engine(case)
    (request,) = found.add(PROMPT, case[2])
    events = drain(found)
    assert not any(event.hearing or event.guess for event in events)
    assert traced(case)[1] == request.output


def test_nothing_is_made_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    from pilotfish.engine import judge

    def unwanted(*_: Any) -> None:
        raise AssertionError("somebody listened")

    for name in ("Witness", "hear", "hear_choices"):
        monkeypatch.setattr(judge, name, unwanted)
    for case in CASES.values():
        found = an_engine(case)
        found.add(PROMPT, case[2])
        drain(found)
    with pytest.raises(AssertionError, match="somebody listened"):
        traced(CASES["greedy trees"])


# -- negative controls ----------------------------------------------------------------------------------------------


def tampered(one: dict[str, Any], place: str) -> dict[str, Any] | None:
    """The record with one number changed; None if it has no such number."""
    one = copy.deepcopy(one)
    what, name = place.split(".")
    parts = {"trial": one["trials"], "node": one["nodes"], "row": one["rows"], "last": [one["last"]]}[what]
    part = next((part for part in parts if part.get(name) is not None), None)
    if part is None:
        return None
    value = part[name]
    if isinstance(value, bool):
        part[name] = not value
    elif isinstance(value, list):
        part[name] = [(value[0] + 1) % NUM_IDS, "?"]
    else:
        part[name] = (value + 0.37) % 1
    return one


PLACES = {
    "greedy": ["trial.passed", "node.p", "row.choice", "last.token"],
    "coupled": ["trial.passed", "trial.score", "node.p", "row.choice", "row.score", "last.token"],
    "rejection": ["trial.passed", "trial.u", "trial.threshold", "trial.left", "node.p", "node.q", "last.u", "last.low"],
    "block": ["trial.passed", "trial.u", "trial.threshold", "trial.weight", "node.q", "last.token", "last.high"],
}


@pytest.mark.parametrize("name", ["greedy trees", "coupled trees", "rejection, drawn trees", "block, drawn"])
def test_a_wrong_number_is_found_out(name: str) -> None:
    """The auditor would see it: each of these records passes as it is, and fails with one number changed."""
    case, text = CASES[name], list(PROMPT)
    found = set()
    for one in traced(case)[0]:
        for place in PLACES[one["rule"]]:
            wrong = tampered(one, place)
            if wrong is not None:
                found.add(place)
                with pytest.raises(AssertionError):
                    audit(wrong, text, MODEL, case[1])
        text += one["ids"]
    assert found == set(PLACES[name.split()[0].rstrip(",")])


def test_another_law_is_found_out() -> None:
    """Of the target, or of the drafter: a drafter that lies about q says so in its records."""
    records, _ = traced(CASES["rejection, drawn trees"])
    one = next(one for one in records if one["nodes"])
    text = [*PROMPT, *(id for before in records[: one["pass"] - 1] for id in before["ids"])]
    for model, q in ((OTHER, OTHER.law), (MODEL, MODEL.law), (MODEL, None)):
        with pytest.raises(AssertionError):
            audit(one, text, model, q)
    audit(one, text, MODEL, OTHER.law)


# -- what else a record says ----------------------------------------------------------------------------------------


def test_penalties_and_cuts_are_part_of_p() -> None:
    """A token that is cut off has p 0 and needs no coin."""
    params = SamplingParams(temperature=0.7, max_tokens=40, top_k=2)
    records, _ = traced((lambda: guesser(NUM_IDS), None, params, "rejection"))
    trials = [(one["nodes"][trial["node"]], trial) for one in records for trial in one["trials"]]
    without = [trial for node, trial in trials if node["p"] == 0]
    assert without and all("u" not in trial and not trial["passed"] for trial in without)
    assert all(len(row["top"]) == 2 for one in records for row in one["rows"])


def test_a_text_that_ends_inside_a_run_says_so() -> None:
    """The verdict is told whole, what was emitted is less."""
    model = TableModel(NUM_IDS, order=1, num_phases=1, eos={6}, sharpness=1.0)
    ended = 0
    for seed in range(30):
        found, records = engine(model, random_trees(NUM_IDS, model.law), k=5, entropy=lambda seed=seed: seed), []
        listen(found, None, records.append)
        found.add(PROMPT, SamplingParams(max_tokens=40))
        drain(found)
        last = records[-1]
        if len(last["ids"]) < len(last["path"]) + 1 and last["finish"] == "stop":
            ended += 1
            assert last["ids"][-1] == 6 and sum(last["draft"]["accepted"]) == len(last["ids"])
    assert ended


def test_a_broken_law_is_no_number() -> None:
    """NaN behind a guess: the record is JSON all the same."""
    model = TableModel(NUM_IDS, order=1, poison={5})
    model.table[:, :, 5] = -9
    for params in (GREEDY, SAMPLED):
        records, _ = [], engine(model, guesser(NUM_IDS), k=5)
        listen(_, None, lambda one, records=records: records.append(json.loads(json.dumps(one, allow_nan=False))))
        _.add(PROMPT, params)
        drain(_)
        assert any(node["id"] == 5 for one in records for node in one["nodes"])
        assert all(one["ids"] for one in records)


def test_who_drafted_and_how_much_was_allowed() -> None:
    from pilotfish.drafters.first_of import FirstOfDrafter

    second = guesser(NUM_IDS)
    second.__class__ = type("Second", (type(second),), {"__module__": "elsewhere.second"})
    found, records = engine(MODEL, FirstOfDrafter([SlowStart(random_trees(NUM_IDS)), second]), k=4), list[Any]()
    listen(found, None, records.append)
    found.add(PROMPT, GREEDY)
    drain(found)
    assert {one["draft"]["method"] for one in records if one["draft"]} == {"adversaries", "second"}
    rooms = [min(4, 40 - before["num_output"] - 1) for before in records]
    assert [one["num_allowed"] for one in records[1:]] == rooms[:-1]


def test_tokens_have_their_text() -> None:
    tokenizer = ByteTokenizer(NUM_IDS, first_byte=97)
    found, records = engine(MODEL, random_trees(NUM_IDS), k=5, tokenizer=tokenizer), list[Any]()
    listen(found, tokenizer, records.append)
    found.add(PROMPT, GREEDY)
    drain(found)
    name = [*"abcdefg", "<eos>"]
    for one in records:
        assert one["tokens"] == [name[id] for id in one["ids"]]
        assert one["last"]["token"] == (one["last"]["token"][0], name[one["last"]["token"][0]])
        for id, word, p in one["rows"][0]["top"]:
            assert word == name[id] and 0 < p <= 1 and math.isfinite(p)


# -- files ----------------------------------------------------------------------------------------------------------


def test_a_file_has_a_record_a_line(tmp_path: Any) -> None:
    path = tmp_path / "trace.jsonl"
    for append, num_lines in ((False, 1), (True, 2), (False, 1)):
        with TraceFile(path, append=append) as file:
            file.write({"word": "ä⏎"})
        lines = path.read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines] == [{"word": "ä⏎"}] * num_lines


def test_a_file_that_cannot_be_written(tmp_path: Any) -> None:
    with pytest.raises(OptionError, match="the trace cannot be written to .*nowhere"):
        TraceFile(tmp_path / "nowhere" / "trace.jsonl")
    with TraceFile(tmp_path / "trace.jsonl") as file:

        class Full:
            def write(self, _: str) -> None:
                raise OSError(28, "No space left on device")

            close = file._file.close

        file._file = Full()  # type: ignore[assignment]
        with pytest.raises(PilotfishError, match="No space left"):
            file.write({})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_told_once_and_as_our_own_error():
    with pytest.raises(PilotfishError, match="cannot be written"), TraceFile("/dev/full") as file:
        file.write({"a": 1})

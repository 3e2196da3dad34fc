"""The trials of the server run, on a fake one; and they find what is broken. How fast it is is not asserted."""

import asyncio
import json

import pytest

from pilotfish.bench.prompts import BenchPrompt
from pilotfish.bench.serving import trials
from pilotfish.bench.serving.client import Outcome, gathered
from pilotfish.bench.serving.host import add_routes
from pilotfish.bench.serving.options import ServingOptions
from pilotfish.errors import OptionError
from tests.server.fakes import a_server, listening, singer, table

PROMPTS = [BenchPrompt(f"p{i}", "x", text, True) for i, text in enumerate(("one", "two", "three"))]
QUICK = ServingOptions(
    trials="load", streams=3, seconds=1.0, warmup=0.0, max_tokens=6, connects=40, rounds=1, concurrency="1,2"
)


@pytest.fixture(scope="module")
def port():
    server = a_server(table(context=512), served_model_name="tried", read_timeout=0.5)
    add_routes(server)
    with listening(server) as address:
        yield int(address.rstrip("/").rpartition(":")[2])


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(trials, "READ_TIMEOUT", 0.5)
    monkeypatch.setattr(trials, "_SLOW_BYTES", 2)
    monkeypatch.setattr(trials, "_SAMPLE_SECONDS", 0.2)
    monkeypatch.setattr(trials, "MOST_SPREAD", 1.0)  # in a second, in a process of tests, memory says nothing
    monkeypatch.setattr(trials, "LEAST_RATIO", 0.0)
    monkeypatch.setattr(trials, "MOST_DELAY", 1000.0)
    monkeypatch.setattr(trials, "_LATE_SECONDS", 20.0)
    monkeypatch.setattr(
        trials, "_HELD", ("pages", "places", "requests")
    )  # the tests' own threads and files come and go


@pytest.mark.parametrize("trial", [trials.load, trials.vanishing, trials.stubborn, trials.overhead])
def test_nothing_is_broken(port, trial):
    findings = asyncio.run(trial(port, PROMPTS, QUICK))
    assert findings.broken == [] and len(findings.rows) >= 2


def test_a_text_that_depends_on_its_company_is_found(port, monkeypatch):
    """Negative control: what a request got alone is put wrong."""
    right = trials.stream
    seen = set()

    async def stream(own_port, path, body):
        found = await right(own_port, path, body)
        first = json.dumps(body) not in seen
        seen.add(json.dumps(body))
        return Outcome(f"{found.text}!", found.num_tokens, found.finish) if first else found

    monkeypatch.setattr(trials, "stream", stream)
    findings = asyncio.run(trials.load(port, PROMPTS, QUICK))
    assert any("wrong texts" in told for told in findings.broken)


def test_what_is_left_behind_is_found():
    """Negative control."""
    findings = trials.Findings()
    before = dict.fromkeys(("pages", "places", "requests"), 0)
    trials.nothing_left(before, before | {"pages": 2}, findings)
    assert findings.broken == ["2 more pages than before"]


def test_a_failure_under_way_is_an_error():
    model = singer(context=512)
    server = a_server(model, served_model_name="tried")
    add_routes(server)
    with listening(server) as address:
        model.num_broken = 1
        port = int(address.rstrip("/").rpartition(":")[2])
        found = asyncio.run(trials.stream(port, trials.TEXT, {"prompt": "x", "max_tokens": 5}))
    assert found.error == "the pass failed"


def test_a_stream_without_an_end_is_an_error():
    assert "no end" in str(gathered([b'data: {"choices": []}\n']).error)
    assert "no end" in str(gathered([]).error)
    assert gathered([b"data: [DONE]\n"]).error is None


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"trials": "load,lod"}, "not 'lod'"),
        ({"streams": 0}, "streams must be"),
        ({"seconds": -1.0}, "seconds must be"),
        ({"concurrency": "1,x"}, "concurrency must be"),
        ({"llm": "{"}, "llm is no JSON"),
        ({"llm": "[]"}, "llm must be a JSON object"),
    ],
)
def test_options_are_checked(wrong, told):
    with pytest.raises(OptionError, match=told):
        ServingOptions(**wrong)


def test_requests_are_of_all_kinds():
    made = trials.jobs(PROMPTS, 9)
    assert len({json.dumps(job) for job in made}) >= 18 and {path for path, _ in made} == {trials.CHAT, trials.TEXT}
    assert all("seed" in body or body["temperature"] == 0 for _, body in made)

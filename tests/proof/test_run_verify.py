"""The whole proof: it passes for what is right, fails for what is wrong, and says which."""

import io
import json
from dataclasses import dataclass
from typing import Any

import pytest
from rich.console import Console

from pilotfish.drafters import registry
from pilotfish.drafters.draft_model import DraftModelDrafter
from pilotfish.drafters.drawing import Run
from pilotfish.engine import judge
from pilotfish.engine.scheduler import Scheduler
from pilotfish.errors import DraftError, OptionError, PromptError
from pilotfish.models.load import Loaded
from pilotfish.proof import Report, VerifyOptions, identity, print_report, run_verify
from pilotfish.proof.actors import Liar
from pilotfish.proof.ground import Watch, drive
from pilotfish.proof.report import Check
from tests import adversaries
from tests.fakes import ByteTokenizer, TableModel
from tests.proof import test_laws as wrong


def prove(options, table, config, **more: Any) -> Report:
    return run_verify(options(**more), Loaded(table, None), registry.parse(config))


def failed(report: Report) -> set[str]:
    return {check.name for check in report.checks if not check.passed}


@dataclass
class Method:
    """A speculation whose drafter is given."""

    build: Any
    method: str = "ngram"
    common: registry.CommonOptions = registry.CommonOptions()  # noqa: RUF009 -- frozen
    options: Any = None


@pytest.mark.parametrize(
    "config",
    [
        {"method": "ngram", "prompt_lookup_min": 1},
        {"method": "draft_model"},
        {"method": "suffix", "rejection_sample_method": "block"},
        {"method": "layer_skip", "exit_layer": 1},
        {"method": "staged", "num_speculative_tokens": "auto"},
        {"method": "none"},
    ],
    ids=lambda config: config["method"],
)
def test_every_method_is_lossless(options, table, draft, config):
    if config["method"] in ("draft_model", "staged"):
        config = config | {"model": draft}
    report = prove(options, table, config)
    assert failed(report) == set()
    assert report.lossless
    assert report.verdict.startswith("lossless: all ")
    names = [check.name for check in report.checks]
    assert len(set(names)) == len(names)
    assert "text at temperature 0" in names
    assert "control: a drafter that lies about q is found out" in names
    sampled = "draft_model, rejection" if config["method"] == "draft_model" else "sampled draft, rejection"
    if config["method"] != "staged":
        for kind in ("accepted tokens", "residual tokens", "first two tokens"):
            assert f"{sampled}: {kind}" in names
    assert report.num_near_ties == 0, "float64"
    told = f"drafted {report.num_drafted} tokens, {report.num_accepted} of them accepted."
    assert told in report.verdict or config["method"] == "none"
    assert ("drafted nothing" in report.verdict) == (config["method"] == "none")


def test_texts_alone(options, table, draft, monkeypatch):
    """Quicker, and it says so; what changes a text is still found out."""
    report = prove(options, table, {"method": "draft_model", "model": draft}, texts_only=True, concurrency=1)
    assert report.lossless and "the laws of what is drawn were left out" in report.verdict
    assert not any("tokens" in check.name for check in report.checks)
    assert "in batches of 1 and alone" in report.checks[0].detail
    assert json.loads(report.as_json())["texts_only"] is True
    assert 0 < report.num_accepted < report.num_drafted == json.loads(report.as_json())["num_drafted"]
    honest = judge.match

    def deaf(draft, choose):
        return honest(draft, lambda row, depth: choose(0, 0))

    monkeypatch.setattr(judge, "match", deaf)
    config = {"method": "ngram", "prompt_lookup_min": 1}
    assert "text at temperature 0 with penalties" in failed(prove(options, table, config, texts_only=True))


def test_the_report_is_a_table_a_verdict_and_a_line_of_json(options, table, capsys):
    report = prove(options, table, {"method": "ngram", "num_speculative_tokens": 3})
    print_report(report)
    out, err = capsys.readouterr()
    assert all(line.startswith("verify: ") for line in err.splitlines()), "progress only"
    *rest, last = out.splitlines()
    assert any(line.startswith("lossless: all") for line in rest)
    found = json.loads(last)
    assert found["lossless"] is True
    assert len(found["checks"]) == len(report.checks)
    for check in found["checks"]:
        assert check.keys() >= {"name", "passed", "statistic", "threshold"}
        assert isinstance(check["passed"], bool)
        assert isinstance(check["statistic"], (int, float))
        assert isinstance(check["threshold"], (int, float))
    again = prove(options, table, {"method": "ngram", "num_speculative_tokens": 3})
    assert again.checks == report.checks, "a proof repeats exactly"
    print_report(report, as_json=True)
    assert capsys.readouterr().out == last + "\n"
    screen = io.StringIO()
    screen.isatty = lambda: True
    print_report(report, Console(file=screen, width=120))
    assert "lossless: all" in screen.getvalue() and '{"lossless"' not in screen.getvalue(), "people do not read it"


@pytest.mark.parametrize(
    ("drafted", "accepted", "little"), [(0, 0, True), (99, 60, True), (400, 29, True), (100, 30, False)]
)
def test_a_method_that_hardly_drafted_is_hardly_proven(drafted, accepted, little):
    check = Check("a", True, 0, 0, "", "")
    report = Report("target", "method", (check,), num_drafted=drafted, num_accepted=accepted)
    assert report.verdict.startswith("lossless: all 1 checks passed.")
    assert ("--prompts" in report.verdict.splitlines()[-1]) is little


def test_a_lying_drafter_is_not_lossless(options, table, draft):
    method = Method(lambda setting: Liar(DraftModelDrafter(draft.model, setting)))
    report = run_verify(options(), Loaded(table, None), method)
    assert not report.lossless
    assert "ngram, rejection: accepted tokens" in failed(report)
    assert not any(name.startswith(("text", "sampled", "control")) for name in failed(report)), "all else is right"
    assert "NOT proven lossless" in report.verdict
    assert "tokens are not accepted with probability min(1, p / q)" in report.verdict


def test_a_draft_model_with_another_q_than_it_drew_from_is_not_lossless(options, table, draft, monkeypatch):
    honest = Run.draft
    monkeypatch.setattr(Run, "draft", lambda run, *args: wrong.rules.Draft(*_flattened(honest(run, *args))))
    report = prove(options, table, {"method": "draft_model", "model": draft})
    assert failed(report) & {"draft_model, rejection: accepted tokens", "target as its own draft, rejection"}


def _flattened(draft):
    probs = draft.probs
    return draft.tokens, draft.parents, None if probs is None else probs.sqrt() / probs.sqrt().sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("mutant", "found"),
    [
        (wrong.lenient, "sampled draft, rejection: first two tokens"),
        (wrong.stale_bonus, "sampled draft, rejection: bonus tokens"),
    ],
    ids=["lenient", "bonus"],
)
def test_a_wrong_rule_is_not_lossless(options, table, monkeypatch, mutant, found):
    monkeypatch.setattr(judge, "verify", mutant)
    report = prove(options, table, {"method": "ngram"}, draws=500, temperature=(0,), max_tokens=8)
    assert found in failed(report)
    assert not report.lossless


def test_a_greedy_rule_that_takes_one_guess_too_many_is_not_lossless(options, table, monkeypatch):
    honest = judge.match

    def gullible(draft, choose):
        verdict = honest(draft, choose)
        depth = len(verdict.path)
        if draft.is_chain and depth < len(draft):
            return wrong.Verdict((*verdict.path, depth), choose(depth + 1, depth + 1))
        return verdict

    monkeypatch.setattr(judge, "match", gullible)
    report = prove(options, table, {"method": "ngram", "prompt_lookup_min": 1}, draws=100)
    assert "text at temperature 0" in failed(report)
    assert "text at temperature 1 (seeded)" not in failed(report), "only the greedy rule is broken"
    (check,) = (check for check in report.checks if check.name == "text at temperature 0")
    assert "fault at position" in check.detail


def test_a_seeded_rule_that_listens_to_the_draft_is_not_lossless(options, table, monkeypatch):
    def rejecting(draft, p_NV, rule, noise):
        return wrong.rules.verify(draft, p_NV, "rejection", noise)

    monkeypatch.setattr(judge, "verify", rejecting)
    report = prove(options, table, {"method": "ngram", "prompt_lookup_min": 1}, draws=300)
    assert "text at temperature 1 (seeded)" in failed(report)
    assert "sampled draft, coupled: first two tokens" not in failed(report), "the law is right, the text is not"


def test_a_draft_that_is_not_the_target_is_found_out(options, table, draft, monkeypatch):
    monkeypatch.setattr(identity, "DraftModelDrafter", lambda _model, setting: DraftModelDrafter(draft.model, setting))
    report = prove(options, table, {"method": "none"}, draws=100)
    own = {name for name in failed(report) if name.startswith("target as its own draft")}
    assert len(own) == 3


def test_lost_pages_are_found_out(options, table, monkeypatch):
    def forgetful(self, request):
        if request in self.running:
            self.running.remove(request)

    monkeypatch.setattr(Scheduler, "remove", forgetful)
    report = prove(options, table, {"method": "none"}, draws=50, max_tokens=4)
    assert "pages" in failed(report)


def test_pages_a_drafter_keeps_are_found_out(ground, table, draft, monkeypatch):
    own = ground(table, build=lambda setting: DraftModelDrafter(draft.model, setting))
    monkeypatch.setattr(DraftModelDrafter, "release", lambda _self, _request: None)
    engine, watch = own.engine(), Watch()
    engine.add([1, 2, 3], own.params(0, 0.0, 8))
    drive(engine, watch)
    assert len(watch.faults) == 1
    assert watch.faults[0].startswith("the drafter still holds")


def test_a_failing_drafter_is_lossless_and_proves_nothing(options, table):
    method = Method(lambda _setting: adversaries.Faulty(adversaries.foresight(table)))
    report = run_verify(options(draws=100), Loaded(table, None), method)
    assert failed(report) >= {"drafter never failed"}
    assert not any(name.startswith("text") for name in failed(report)), "it decoded plainly instead"


def test_too_few_draws_prove_nothing(options, table):
    report = prove(options, table, {"method": "none"}, draws=20, max_tokens=4)
    assert "control: a drafter that lies about q is found out" in failed(report)
    assert not report.lossless
    assert "raise draws" in report.verdict


def test_a_law_without_a_choice_proves_nothing(options):
    certain = TableModel(12, sharpness=1000.0)
    report = prove(options, certain, {"method": "none"}, draws=200, max_tokens=4)
    assert not report.lossless
    assert "more than one way to go on" in report.verdict


def test_bad_prompts_options_and_drafts_are_the_user_s_to_mend(options, table, prompts):
    with pytest.raises(PromptError, match="no tokenizer"):
        prove(options, table, {"method": "ngram"}, prompts=None)
    with pytest.raises(DraftError, match="needs a draft model"):
        prove(options, table, {"method": "draft_model"})
    for name, value in (("draws", 0), ("temperature", (-1.0,)), ("temperature", ()), ("candidates", 1), ("limit", 0)):
        with pytest.raises(OptionError, match=name):
            VerifyOptions(**{name: value})


def test_built_in_prompts_and_a_tokenizer(table):
    target = Loaded(TableModel(257, order=1, context=4096, sharpness=3.0), ByteTokenizer(257))
    target.tokenizer.hf = type("NoTemplate", (), {"chat_template": None})
    report = run_verify(VerifyOptions(draws=300, max_tokens=8, limit=1), target, registry.parse({"method": "ngram"}))
    assert failed(report) == set()


def test_a_draft_model_given_by_name_is_loaded_once(options, table, draft, monkeypatch):
    loaded = []

    def load(name, **how):
        loaded.append((name, how["quantization"]))
        return draft

    monkeypatch.setattr("pilotfish.models.load.load", load)
    report = prove(options, table, {"method": "draft_model", "model": "small", "quantization": "int8"}, draws=100)
    assert loaded == [("small", "int8")]
    assert "draft_model (table)" in report.method

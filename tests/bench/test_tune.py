"""tune ranks what the bench measured and writes down a config that reads back."""

import json
from pathlib import Path

import pytest

from pilotfish.bench.results import Report, Row
from pilotfish.bench.tune import TuneOptions, fitting, ranking, run_tune
from pilotfish.drafters import registry
from pilotfish.engine.options import EngineOptions
from pilotfish.errors import OptionError
from pilotfish.models.load import from_objects
from tests.models.tiny import tiny_model


def row(method: str, k: int, speedup: float, category: str = "all") -> Row:
    nothing = (None, None, None)
    return Row(method, category, 0.0, 10 * speedup, speedup, 1.0, [], *nothing, True, [], num_speculative_tokens=k)


def test_the_ranking_has_plain_decoding_in_it() -> None:
    report = Report([row("none", 0, 1.0), row("ngram", 2, 0.9), row("ngram", 4, 1.2), row("ngram", 4, 9.0, "math")])
    choices = ranking(report, [{"method": "ngram", "prompt_lookup_max": 3}])
    assert [choice.config for choice in choices] == [
        {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 4},
        {"method": "none"},
        {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 2},
    ]


def test_the_winner_is_written_and_reads_back(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": [1, 2, 3, 1, 2, 3]}) + "\n")
    out = tmp_path / "best.json"
    options = TuneOptions(prompts=str(prompts), max_tokens=6, num_speculative_tokens="2", out=str(out))
    target = from_objects(tiny_model("llama"))
    configs, reasons = fitting(target, ["ngram", "draft_model"], {}, EngineOptions())
    assert [config["method"] for config in configs] == ["ngram"]
    assert "needs a draft model" in reasons["draft_model"]
    choices = run_tune(options, target, [registry.parse(config) for config in configs], configs)
    assert {choice.row.method for choice in choices} == {"none", "ngram"}
    assert registry.parse(json.loads(out.read_text())).method == choices[0].row.method


def test_a_file_that_cannot_be_written_is_named_before_anything_runs() -> None:
    options = TuneOptions(out="no/such/folder/best.json")
    with pytest.raises(OptionError, match="no folder"):
        run_tune(options, from_objects(tiny_model("llama")), [], [])

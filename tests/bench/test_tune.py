"""tune ranks what the bench measured and writes down a config that reads back."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from pilotfish.bench.options import TuneOptions
from pilotfish.bench.prompts import read_prompts
from pilotfish.bench.results import Report, Row
from pilotfish.bench.tune import (
    Choice,
    Ranking,
    confidence,
    fitting,
    print_ranking,
    ranking,
    run_tune,
    with_frequent_tokens,
)
from pilotfish.bench.vocabulary import count_own_text, prompts_to_count
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


def test_it_says_how_sure_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    def choice(method: str, *speedups: float) -> Choice:
        own = replace(row(method, 4, fmean(speedups)), num_prompts=len(speedups))
        return Choice(own, {"method": method}, dict(enumerate(speedups)))

    best = choice("suffix", 1.0, 1.5, 2.0, 3.5)
    # Prompts differ more than methods do: one that is a little slower on each is told apart, though its mean is near.
    behind, mixed = choice("ngram", 0.9, 1.4, 1.8, 3.2), choice("staged", 1.9, 1.4, 1.5, 3.1)
    about, close = confidence([best, mixed, behind], 2)
    assert "4 prompts, 2 repeats each: suffix 4, 2.00 x plain decoding, give or take 1.72" in about
    assert close == "too close to tell from it: staged 4; more prompts would tell (--limit, --prompts)"
    assert len(confidence([best, behind], 2)) == 1
    about, close = confidence([choice("suffix", 1.5), choice("ngram", 0.5)], 1)
    assert "give or take" not in about and "ngram 4" in close, "one prompt tells nothing"
    print_ranking(Ranking([best, mixed]), {}, TuneOptions(out="best.json"))
    *lines, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == {"method": "suffix"}
    assert any(line.startswith("chosen from 4 prompts") for line in lines)


def test_the_winner_is_written_and_reads_back(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": [1, 2, 3, 1, 2, 3]}) + "\n")
    out = tmp_path / "best.json"
    options = TuneOptions(prompts=str(prompts), max_tokens=6, num_speculative_tokens="2", out=str(out))
    target = from_objects(tiny_model("llama"))
    configs, reasons = fitting(target, ["ngram", "draft_model"], {}, EngineOptions())
    assert [config["method"] for config in configs] == ["ngram"]
    assert "needs a draft model" in reasons["draft_model"]
    choices = run_tune(options, target, [registry.parse(config) for config in configs], configs).choices
    assert {choice.row.method for choice in choices} == {"none", "ngram"}
    assert registry.parse(json.loads(out.read_text())).method == choices[0].row.method


def test_a_file_that_cannot_be_written_is_named_before_anything_runs() -> None:
    options = TuneOptions(out="no/such/folder/best.json")
    with pytest.raises(OptionError, match="no folder"):
        run_tune(options, from_objects(tiny_model("llama")), [], [])


# -- a list of frequent tokens for a draft model ---------------------------------------------------------------------


def written(tmp_path: Path, num_prompts: int) -> Path:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": [40 + i, 2, 3]}) + "\n" for i in range(num_prompts)))
    return prompts


def test_a_draft_model_is_tried_with_the_target_s_frequent_tokens_too(tmp_path: Path) -> None:
    out = tmp_path / "best.json"
    target, draft = from_objects(tiny_model("llama")), from_objects(tiny_model("llama", seed=1))
    options = TuneOptions(
        prompts=str(written(tmp_path, 1)), max_tokens=6, num_speculative_tokens="2", repeats=1, out=str(out)
    )
    config = {"model": draft, "draft_vocab_size": 20}
    configs, _ = fitting(target, ["ngram", "draft_model"], config, EngineOptions())
    more = with_frequent_tokens(options, target, configs, EngineOptions())
    path = tmp_path / "best.vocabulary.json"
    assert more == [{**config, "method": "draft_model", "draft_vocabulary": str(path)}]
    both = [*configs, *more]
    choices = run_tune(options, target, [registry.parse(one) for one in both], both).choices
    drafters = {choice.row.drafter: choice.config for choice in choices if choice.row.method == "draft_model"}
    frequent = next(config for about, config in drafters.items() if "the most frequent 20 of 64 tokens" in about)
    lowest = next(config for about, config in drafters.items() if "the lowest 20 of 64 tokens" in about)
    assert frequent["draft_vocabulary"] == str(path) and "draft_vocabulary" not in lowest


def test_what_is_counted_is_not_what_is_measured_if_there_is_more(tmp_path: Path) -> None:
    target = from_objects(tiny_model("llama"))
    options = TuneOptions(prompts=str(written(tmp_path, 5)), limit=2, max_tokens=4, own_tokens=13)
    prompts, apart = prompts_to_count(options)
    measured = read_prompts(options.prompts, options.limit)
    assert apart and len(prompts) == 3 and not {str(p) for p in prompts} & {str(p) for p in measured}
    listed = count_own_text(target, prompts, options, EngineOptions())
    # Prompts, answers and two rounds of drawn ones; and as much again, but for the first tokens, that was expected.
    assert abs(sum(listed.counts) - (3 * 7 + 6 * 4) - (3 * 6 + 6 * 3)) < 0.01
    alone = TuneOptions(prompts=str(written(tmp_path, 2)), limit=2)
    assert prompts_to_count(alone)[1] is False


def test_no_list_where_none_is_of_use(tmp_path: Path) -> None:
    target, options = from_objects(tiny_model("llama")), TuneOptions(out=str(tmp_path / "best.json"))
    for config in ({"method": "ngram"}, {"method": "draft_model"}, {"method": "staged", "draft_vocab_size": 64}):
        assert with_frequent_tokens(options, target, [config], EngineOptions()) == []
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OptionError, match="own_tokens must be"):
        TuneOptions(own_tokens=-1)

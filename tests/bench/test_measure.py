"""A whole bench run on models whose every text is known: who runs when, what is compared, what ends up in rows."""

import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from pilotfish.bench import BenchOptions, Report, Row, print_report, run_bench
from pilotfish.bench import measure as measure_module
from pilotfish.bench.divergence import first_difference, margin, next_logits
from pilotfish.decoding.noise import exponentials
from pilotfish.decoding.sampling import SamplingParams
from pilotfish.drafters import registry
from pilotfish.drafters.draft_model import DraftModelOptions
from pilotfish.drafters.ngram import NgramDrafter
from pilotfish.engine.options import EngineOptions
from pilotfish.errors import DraftError, OptionError, PromptError
from pilotfish.models.base import ModelInfo, ModelOutput
from pilotfish.models.load import Loaded, from_objects
from pilotfish.paged.batch import Batch
from pilotfish.paged.cache import KVCache
from tests.fakes import TableModel, oracle
from tests.models.tiny import tiny_model

KEYS = {
    "method", "category", "temperature", "tokens_per_second", "speedup", "mean_acceptance_length",
    "acceptance_by_position", "alpha", "c", "predicted_speedup", "identical", "divergences",
}  # fmt: skip


class Unsteady(TableModel):
    """Adds ``error`` to one token's logit in passes over several rows: a target whose rows depend on their batch."""

    error = 0.0

    def forward(self, batch: Batch, cache: KVCache, *, taps: Sequence[int] = ()) -> ModelOutput:
        output = super().forward(batch, cache, taps=taps)
        if len(batch.wanted_N) > 1:
            output.logits_NV[:, 3] += self.error
        return output


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """Three prompts of ids in category a, one in b."""
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": [1 + i, 2, 3, 1 + i, 2, 3, 1], "category": "b" if i == 1 else "a"} for i in range(4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def table(kind: type[TableModel] = TableModel, **options: Any) -> TableModel:
    return kind(8, order=1, num_phases=5, sharpness=3, **options)


def target(**options: Any) -> Loaded:
    return Loaded(table(**options), None)


def draft(name: str = "draft") -> Loaded:
    """Often right about `target`, and sometimes wrong."""
    model = table(name=name)
    model.table += 2 * torch.randn(model.table.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return Loaded(model, None)


def bench(
    prompts: str, loaded: Loaded | None = None, methods: Sequence[Any] = ({"method": "ngram"},), **options: Any
) -> Report:
    given = {"repeats": 1, "max_tokens": 12, "num_speculative_tokens": "5"} | options
    return run_bench(BenchOptions(prompts=prompts, **given), loaded or target(), methods)


def row_of(report: Report, method: str, category: str = "all", k: Any = None) -> Row:
    (row,) = [
        row
        for row in report.rows
        if (row.method, row.category) == (method, category) and k in (None, row.num_speculative_tokens)
    ]
    return row


def test_a_row_per_method_and_category_with_all_figures(prompts: str) -> None:
    report = bench(prompts, methods=[{"method": "ngram"}, {"method": "draft_model", "model": draft()}], repeats=2)
    assert [(row.method, row.category) for row in report.rows] == [
        (method, category) for method in ("none", "ngram", "draft_model") for category in ("a", "b", "all")
    ]
    for row in report.rows:
        assert row.identical is True
        assert row.divergences == []
        assert row.tokens_per_second is not None and row.tokens_per_second > 0
        assert row.speedup is not None and row.predicted_speedup is not None
        assert row.time_to_first_token is not None and row.time_to_first_token > 0
        assert row.num_prompts == {"a": 3, "b": 1, "all": 4}[row.category]
    drafted = row_of(report, "draft_model")
    assert drafted.alpha is not None and 0 < drafted.alpha < 1
    assert drafted.c is not None and drafted.c > 0
    assert drafted.verify_ratio is not None
    assert drafted.drafter == "draft"
    assert len(drafted.acceptance_by_position) == drafted.num_speculative_tokens == 5
    plain = row_of(report, "none")
    assert plain.speedup == plain.predicted_speedup == plain.mean_acceptance_length == 1
    assert plain.num_steps == 2 * 4 * 11  # of 12 tokens the first comes with the prompt


def test_passes_of_a_model_that_drafts_are_counted(prompts: str) -> None:
    """A pass a drafted token at most, and one to read the prompt; look-ups have none."""
    methods = [{"method": "ngram"}, {"method": "draft_model", "model": draft()}]
    report = bench(prompts, methods=methods, num_speculative_tokens="1")
    assert row_of(report, "ngram").draft_passes_per_token is None
    row = row_of(report, "draft_model")
    assert row.draft_passes_per_token is not None and 0.4 < row.draft_passes_per_token < 1.2
    without = replace(report, rows=[one for one in report.rows if one.method != "draft_model"])
    for shown, told in ((report, True), (without, False)):
        screen = Console(file=io.StringIO(), width=152)
        print_report(shown, screen)
        assert ("draft passes" in screen.file.getvalue()) is told  # type: ignore[attr-defined]


def test_a_perfect_draft_is_accepted_whole(prompts: str) -> None:
    loaded = target()
    report = bench(
        prompts,
        loaded,
        [{"method": "draft_model", "model": loaded, "num_speculative_tokens": 3}],
        max_tokens=17,
        num_speculative_tokens="3",
    )
    row = row_of(report, "draft_model")
    assert row.alpha == 1.0
    assert row.acceptance_by_position == [1.0, 1.0, 1.0]
    # The prompt's pass emits 4 tokens, then three full steps 12, and the last token comes alone.
    assert row.num_steps == 4 * 4
    assert row.mean_acceptance_length == pytest.approx((3 * 4 + 1) / 4)


def test_every_k_is_measured(prompts: str) -> None:
    report = bench(prompts, num_speculative_tokens="2,4", methods=[{"method": "draft_model", "model": draft()}])
    assert {row.num_speculative_tokens for row in report.rows if row.method == "draft_model"} == {2, 4}
    assert len(row_of(report, "draft_model", k=2).acceptance_by_position) == 2
    assert len(row_of(report, "draft_model", k=4).acceptance_by_position) == 4


def test_k_may_be_left_to_the_engine(prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    row = row_of(bench(prompts, num_speculative_tokens="auto"), "ngram")
    assert (row.num_speculative_tokens, row.identical, row.verify_ratio) == ("auto", True, None)


def test_plain_decoding_is_measured_once_even_if_asked_for(prompts: str) -> None:
    report = bench(prompts, methods=[{"method": "none"}, {"method": "none"}])
    assert [row.category for row in report.rows] == ["a", "b", "all"]


def test_seeded_samples_are_compared_and_others_are_not(prompts: str) -> None:
    drafting = {"method": "draft_model", "model": draft()}
    seeded = row_of(bench(prompts, methods=[drafting], temperature=1.0, seed=7), "draft_model")
    assert seeded.identical is True
    free = row_of(bench(prompts, methods=[drafting], temperature=1.0), "draft_model")
    assert free.identical is None
    assert free.divergences == []


def test_a_batch_is_of_one_category_and_counts_every_token(prompts: str) -> None:
    report = bench(prompts, methods=[{"method": "draft_model", "model": draft()}], concurrency=2)
    assert all(row.identical for row in report.rows)
    plain = row_of(report, "none")
    assert plain.num_steps == 3 * 11  # two prompts of a together, the third of a, and the one of b
    assert plain.num_prompts == 4


def test_methods_take_turns_in_rotating_order(prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[int, int]] = []
    run = measure_module._run

    def noting(work: Any, llm: Any, clock: Any, variant: Any, unit: Any, repeat: int) -> Any:
        order.append((unit.index, variant.index))
        return run(work, llm, clock, variant, unit, repeat)

    monkeypatch.setattr(measure_module, "_run", noting)
    bench(prompts, methods=[{"method": "ngram"}, {"method": "ngram", "prompt_lookup_max": 2}], limit=2, repeats=2)
    assert order[:6] == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (1, 0)]
    assert order[6:9] == [(0, 1), (0, 2), (0, 0)]


def test_a_later_repeat_does_not_profit_from_an_earlier_one(prompts: str) -> None:
    once, twice = target(), target()
    bench(prompts, once, [{"method": "ngram"}], repeats=1)
    bench(prompts, twice, [{"method": "ngram"}], repeats=2)
    assert isinstance(once.model, TableModel) and isinstance(twice.model, TableModel)
    assert twice.model.num_rows == 2 * once.model.num_rows


def test_a_draft_model_is_loaded_once(prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []

    def load_named(options: DraftModelOptions, _target: ModelInfo) -> Loaded:
        loads.append(options.model)
        return draft(options.model)

    monkeypatch.setattr(measure_module, "load_named", load_named)
    speculation = registry.parse({"method": "draft_model", "model": "small"})
    report = bench(prompts, methods=[speculation], repeats=3, num_speculative_tokens="2,3")
    assert loads == ["small"]
    assert row_of(report, "draft_model", k=3).drafter == "small"


def test_where_texts_part_and_by_how_much(prompts: str) -> None:
    model = table(Unsteady)
    assert isinstance(model, Unsteady)
    model.error = 50.0
    report = bench(prompts, Loaded(model, None), [{"method": "draft_model", "model": target()}])
    assert row_of(report, "none").identical is True
    row = row_of(report, "draft_model")
    assert row.identical is False
    assert len(row.divergences) == 4
    first, prompt = row.divergences[0], [1, 2, 3, 1, 2, 3, 1]
    plain = oracle(model.logits_of, prompt, SamplingParams(temperature=0, max_tokens=12))
    apart = next(i for i, token in enumerate(plain) if token != 3)  # the prompt's pass has several wanted rows already
    assert (first.prompt, first.position) == ("line 1", apart)
    logits_V = model.logits_of([*prompt, *plain[:apart]])
    assert first.margin == pytest.approx(float(logits_V.max() - logits_V[3]))
    assert first.margin > 0.01


def test_the_margin_is_a_difference_of_logits_or_of_scores() -> None:
    model = TableModel(8, order=2, num_phases=3)
    prefix = list(range(8)) * 5
    logits_V = model.logits_of(prefix)
    assert torch.equal(next_logits(model, prefix), logits_V)
    greedy = margin(model, prefix, 2, 5, SamplingParams(temperature=0))
    assert greedy == pytest.approx(float(logits_V[2] - logits_V[5]))
    scores_V = (logits_V / 0.7) - exponentials(11, len(prefix), 8).log()
    seeded = margin(model, prefix, 2, 5, SamplingParams(temperature=0.7, seed=11))
    assert seeded == pytest.approx(float(scores_V[2] - scores_V[5]))


def test_a_long_prefix_is_read_in_chunks() -> None:
    model = TableModel(8, order=2, num_phases=3, context=2048)
    prefix = [(7 * i) % 8 for i in range(1100)]
    assert torch.equal(next_logits(model, prefix), model.logits_of(prefix))
    assert model.num_passes == 3


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], []) is None


def test_interrupted_it_reports_what_there_is(prompts: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    run, left = measure_module._run, [5]

    def until(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return run(*arguments)

    monkeypatch.setattr(measure_module, "_run", until)
    report = bench(prompts, repeats=3)
    assert report.environment["interrupted"] is True
    assert row_of(report, "none").num_prompts + row_of(report, "ngram").num_prompts == 5
    print_report(report)
    assert "interrupted" in capsys.readouterr().out
    left[0] = 0
    assert bench(prompts).rows == []


def test_interrupted_in_its_trace_it_reports_what_was_measured(
    prompts: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure_module, "_trace", interrupted)
    report = bench(prompts, trace=str(tmp_path / "trace.jsonl"))
    assert report.environment["interrupted"] is True
    assert row_of(report, "ngram").num_prompts == 4


def test_a_failing_drafter_is_counted(prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: Any) -> Any:
        raise RuntimeError("no idea")

    monkeypatch.setattr(NgramDrafter, "propose", fail)
    row = row_of(bench(prompts), "ngram")
    assert row.num_failed_drafts > 0
    assert row.identical is True
    assert row.alpha is None


def test_a_trace_is_written_after_what_was_measured(prompts: str, tmp_path: Path) -> None:
    """Each prompt once more with each variant: the measured runs are as many as without, and the texts are theirs."""
    path, numbers = tmp_path / "trace.jsonl", []
    for trace in (None, str(path)):
        loaded = target()
        report = bench(prompts, loaded, concurrency=2, trace=trace)
        assert isinstance(loaded.model, TableModel)
        numbers.append((loaded.model.num_passes, len(report.rows)))
    assert numbers[0][0] < numbers[1][0] < 2 * numbers[0][0] and numbers[0][1] == numbers[1][1]
    texts: dict[tuple[Any, ...], list[int]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        texts.setdefault((one["variant"], one["K"], *one["prompts"], one["request"]), []).extend(one["ids"])
    assert [len(text) for text in texts.values()] == [12] * 8
    assert {key[:2] for key in texts} == {("none", 0), ("ngram", 5)}
    assert [text for key, text in texts.items() if key[0] == "none"] == [
        text for key, text in texts.items() if key[0] == "ngram"
    ]


def test_what_cannot_be_measured_is_refused_before_anything_runs(prompts: str) -> None:
    loaded = target()
    with pytest.raises(
        PromptError, match="line 1 has 7 tokens, which with max_tokens 250 is more than the context of 256"
    ):
        bench(prompts, loaded, max_tokens=250)
    options = BenchOptions(prompts=prompts)
    with pytest.raises(PromptError, match="more than the context of 16"):
        run_bench(options, loaded, [{"method": "ngram"}], engine=EngineOptions(max_model_len=16))
    with pytest.raises(DraftError, match="needs a draft model"):
        bench(prompts, loaded, [{"method": "draft_model"}])
    with pytest.raises(OptionError, match="must name a .png file"):
        bench(prompts, loaded, plot="picture.jpg")
    with pytest.raises(OptionError, match="the trace cannot be written to"):
        bench(prompts, loaded, trace="nowhere/trace.jsonl")
    assert isinstance(loaded.model, TableModel)
    assert loaded.model.num_passes == 0


def test_a_text_that_ends_early_is_no_divergence(prompts: str) -> None:
    report = bench(prompts, target(eos={5}), [{"method": "draft_model", "model": target()}], max_tokens=40)
    row = row_of(report, "draft_model")
    assert row.identical is True
    assert row.alpha == 1.0  # what lay behind the end of a text was never judged
    assert row_of(report, "none").num_steps < 4 * 39
    on = bench(prompts, target(eos={5}), max_tokens=40, ignore_eos=True)
    assert row_of(on, "none").num_steps == 4 * 39


def test_a_transformers_model(prompts: str) -> None:
    report = bench(prompts, from_objects(tiny_model()), [{"method": "ngram"}], limit=2)
    assert row_of(report, "ngram").identical is True
    assert report.environment["architecture"] == "LlamaForCausalLM"


def test_the_last_line_is_one_json_document(prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench(prompts, methods=[{"method": "ngram"}], temperature=1.0)
    print_report(report)
    captured = capsys.readouterr()
    *table, last = captured.out.splitlines()
    document = json.loads(last, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert set(document) == {"rows", "environment"}
    assert all(row.keys() >= KEYS for row in document["rows"])
    assert {(row["method"], row["category"]) for row in document["rows"]} >= {("ngram", "all"), ("none", "b")}
    assert all(row["identical"] is None for row in document["rows"])
    environment = document["environment"]
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["threads"] == torch.get_num_threads()
    assert environment["settings"]["temperature"] == 1.0
    assert environment["model"] == "table"
    assert any("ngram 5" in line and "all" in line for line in table)
    assert not math.isnan(document["rows"][0]["tokens_per_second"])

"""A bench of an encoder-decoder target: prompts are its sources, and a difference is judged from its source too."""

import json
from pathlib import Path
from typing import Any

import pytest

from pilotfish.bench import BenchOptions, run_bench
from pilotfish.bench.divergence import margin
from pilotfish.bench.layers import best_layers
from pilotfish.bench.options import TuneOptions
from pilotfish.decoding.paths import join
from pilotfish.decoding.sampling import SamplingParams
from pilotfish.engine.options import EngineOptions
from pilotfish.errors import PromptError
from pilotfish.models.load import Loaded
from tests.fakes import SourcedTable

SOURCES = [[1 + i, 2, 3, 1 + i, 2, 3, 1] * 3 for i in range(3)]
TARGET = SourcedTable(8, order=1, num_phases=5, sharpness=3, context=40)
GREEDY = SamplingParams(temperature=0)


class Unsteady(SourcedTable):
    """Says something else in passes over several rows."""

    def forward(self, batch: Any, cache: Any, **more: Any) -> Any:
        output = super().forward(batch, cache, **more)
        if len(batch.wanted_N) > 1:
            output.logits_NV[:, 3] += 50
        return output


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": source}) + "\n" for source in SOURCES))
    return str(path)


def bench(prompts: str, target: SourcedTable, **options: Any) -> Any:
    given = {"prompts": prompts, "repeats": 1, "max_tokens": 12, "num_speculative_tokens": "4"} | options
    return run_bench(BenchOptions(**given), Loaded(target, None), [{"method": "ngram"}])


def test_texts_are_the_same_and_sources_take_no_room_in_them(prompts: str):
    """A source of 21 tokens and a text of 39 are within a context of 40; a text of 40 is not, for it has a start."""
    for options in ({}, {"max_tokens": 39, "ignore_eos": True}):
        report = bench(prompts, TARGET, **options)
        assert [row.identical for row in report.rows] == [True] * len(report.rows)
    with pytest.raises(PromptError, match="has 1 tokens, which with max_tokens 40 is more than the context of 40"):
        bench(prompts, TARGET, max_tokens=40)


def test_a_difference_comes_with_the_margin_after_its_source(prompts: str):
    model = Unsteady(8, order=1, num_phases=5, sharpness=3)
    (row,) = [row for row in bench(prompts, model).rows if row.method == "ngram" and row.category == "all"]
    assert row.identical is False and row.divergences
    assert all(one.margin is not None and one.margin > 0 for one in row.divergences)


@pytest.mark.parametrize("source", SOURCES)
def test_margins(source: list[int]):
    logits = TARGET.after(source, [0, 4])
    assert margin(TARGET, join(source, [0, 4]), 1, 2, GREEDY) == pytest.approx(float(logits[1] - logits[2]))


def test_layers_are_judged_on_texts_with_their_sources(prompts: str, tmp_path: Path):
    options = TuneOptions(prompts=prompts, max_tokens=8, out=str(tmp_path / "best.json"))
    found = best_layers(options, Loaded(TARGET, None), EngineOptions())
    assert found["method"] == "layer_skip" and len(found["skip_layers"]) == 1

"""Searching layers to leave out: one that does nothing is found, and what is predicted follows the paper's formula."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from pilotfish.bench.layers import Subset, Trial, _own_texts, best_layers, search
from pilotfish.bench.options import TuneOptions
from pilotfish.decoding.theory import walltime_factor
from pilotfish.drafters import registry
from pilotfish.engine.options import EngineOptions
from pilotfish.errors import OptionError
from pilotfish.models.load import Loaded, from_objects
from tests.models.tiny import tiny_model


def with_an_idle_layer(idle: int, num_layers: int = 4) -> Loaded:
    """A model one of whose layers adds nothing to the states."""
    model = tiny_model("llama", num_hidden_layers=num_layers)
    layer = model.model.layers[idle]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    return from_objects(model)


def options(tmp_path: Path, **changes: object) -> TuneOptions:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": [10 + i, 20, 30 + i]}) + "\n" for i in range(4)))
    return TuneOptions(prompts=str(prompts), out=str(tmp_path / "best.json"), limit=4, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("idle", [0, 2])
def test_a_layer_that_does_nothing_goes_first(tmp_path: Path, temperature: float, idle: int) -> None:
    target = with_an_idle_layer(idle)
    own = options(tmp_path, temperature=temperature)
    trial = Trial(target.model, _own_texts(own, target, EngineOptions()), temperature)
    assert trial.acceptance([idle]) == pytest.approx(1.0, abs=1e-3)
    assert trial.acceptance([1]) < 0.95  # the control: others are missed
    found = search(trial, [1.0] * 9)
    assert found[0].skipped == (idle,)
    assert [len(subset.skipped) for subset in found] == list(range(1, len(found) + 1))


class Table:
    """Acceptance by what is left out, as if it had been measured."""

    num_layers = 6

    def acceptance(self, skipped: Sequence[int]) -> float:
        return 0.9 - 0.02 * len(skipped) - (0.5 if 5 in skipped else 0.0) - (0.3 if {1, 2} <= set(skipped) else 0.0)

    def cost(self, num_skipped: int) -> float:
        return 1 - num_skipped / 6


def test_the_search_avoids_what_is_missed_and_predicts_by_the_formula() -> None:
    found = search(Table(), [1.0] * 9)  # type: ignore[arg-type]
    assert all(5 not in subset.skipped for subset in found[:3])
    for subset in found:
        assert subset.speedup == pytest.approx(walltime_factor(subset.acceptance, subset.num_drafted, subset.cost))
        assert subset.num_drafted >= 1
    best = max(found, key=lambda subset: subset.speedup)
    assert not {1, 2} <= set(best.skipped) and len(best.skipped) == 4


def test_what_is_found_is_saved_and_reads_back(tmp_path: Path) -> None:
    config = best_layers(options(tmp_path), with_an_idle_layer(1), EngineOptions())
    saved = json.loads((tmp_path / "best.layers.json").read_text())
    assert saved == config and 1 in saved["skip_layers"]
    assert registry.parse(saved).options.skipped == frozenset(saved["skip_layers"])


def test_what_cannot_be_searched_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="single layer"):
        best_layers(options(tmp_path), from_objects(tiny_model("llama", num_hidden_layers=1)), EngineOptions())
    (tmp_path / "taken.layers.json").mkdir()
    with pytest.raises(OptionError, match=r"taken.layers.json cannot be written"):
        best_layers(TuneOptions(out=str(tmp_path / "taken.json")), with_an_idle_layer(1), EngineOptions())
    with pytest.raises(OptionError, match="no folder"):
        best_layers(TuneOptions(out="no/such/folder/x.json"), with_an_idle_layer(1), EngineOptions())


def test_a_subset_describes_itself() -> None:
    assert "layers 2, 5: acceptance 0.50" in Subset((2, 5), 0.5, 0.6, 2, 1.1).describe()

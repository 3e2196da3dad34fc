"""The profile accounts for every step: stages do not overlap, and together with the rest they are the whole."""

import json
from pathlib import Path

import pytest

from pilotfish.bench.options import BenchOptions
from pilotfish.bench.profile import STAGES, print_profile, run_profile
from pilotfish.drafters.registry import parse
from pilotfish.engine.options import EngineOptions
from pilotfish.models.load import from_objects
from tests.models.tiny import tiny_model


def test_stages_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": [1, 2, 3, 1, 2, 3, n]}) + "\n" for n in (4, 5)))
    target = from_objects(tiny_model("llama"))
    options = BenchOptions(prompts=str(prompts), max_tokens=12, seed=1, temperature=1.0)
    plain, ngram, own = run_profile(
        options,
        target,
        [parse({"method": name, "num_speculative_tokens": 5}) for name in ("ngram", "layer_skip")],
        EngineOptions(),
    )
    for profile in (plain, ngram, own):
        assert set(profile.milliseconds) == set(STAGES)
        assert all(value >= 0 for value in profile.milliseconds.values())
        assert profile.milliseconds["target pass"] > 0
        assert 0 <= profile.rest < profile.total
    assert plain.milliseconds["draft"] == 0
    assert own.milliseconds["draft"] > 0  # the target's passes for drafting are drafting
    assert plain.tokens == 1
    print_profile([plain, ngram], target)
    printed = capsys.readouterr().out
    assert "target pass" in printed
    assert "GB/s" in printed

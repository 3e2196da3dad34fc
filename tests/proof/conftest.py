"""A target with an exact table, two prompts of token ids, and the ground that checks stand on."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from pilotfish.drafters import registry
from pilotfish.models.base import CausalLM
from pilotfish.models.load import Loaded
from pilotfish.proof import VerifyOptions
from pilotfish.proof.ground import Ground, Meter
from tests.fakes import TableModel

PROMPTS = ([1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [5, 6, 7, 5, 6])


@pytest.fixture(scope="session")
def table() -> TableModel:
    return TableModel(12, num_phases=3, sharpness=2.0)


@pytest.fixture(scope="session")
def draft() -> Loaded:
    return Loaded(TableModel(12, order=1, seed=5, sharpness=1.0), None)


@pytest.fixture
def prompts(tmp_path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return str(path)


@pytest.fixture
def options(prompts) -> Callable[..., VerifyOptions]:
    """Options of a quick run."""
    return lambda **more: VerifyOptions(**{"prompts": prompts, "draws": 300, "max_tokens": 16} | more)


@pytest.fixture
def ground(options) -> Callable[..., Ground]:
    """The ground under a method on a target."""

    def make(model: CausalLM, config: Any = None, build: Any = None, **more: Any) -> Ground:
        speculation = registry.parse(config or {"method": "ngram", "prompt_lookup_min": 1})
        return Ground(
            model=model,
            tokenizer=None,
            build=build or speculation.build,
            rule=speculation.common.rule,
            num_drafted=speculation.common.num_speculative_tokens,
            prompts=[list(prompt) for prompt in PROMPTS],
            options=options(**more),
            meter=Meter(),
        )

    return make

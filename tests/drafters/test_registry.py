"""Methods are files, options are fields, and a misspelt word meets the nearest real one."""

import importlib
import inspect
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from pilotfish.drafters import registry
from pilotfish.drafters.base import Drafter
from pilotfish.errors import OptionError


def test_every_file_is_a_method():
    folder = Path(inspect.getfile(registry)).parent
    files = {path.stem for path in folder.glob("*.py")} - {
        "__init__",
        "base",
        "drawing",
        "growing",
        "registry",
        "shapes",
        "states",
        "wording",
    }
    assert set(registry.methods()) == files
    assert {"none", "ngram", "draft_model"} <= files


@pytest.mark.parametrize("method", registry.methods())
def test_every_method_is_one_documented_drafter_with_frozen_options(method):
    kind = registry.drafter_class(method)
    assert issubclass(kind, Drafter) and kind.__module__ == f"pilotfish.drafters.{method}"
    assert is_dataclass(kind.Options) and kind.Options.__dataclass_params__.frozen
    kind.Options()  # there are defaults, and they are in range
    assert all(field.metadata.get("help") for field in fields(kind.Options))
    assert importlib.import_module(kind.__module__).__doc__


def test_flags_name_one_thing_each():
    """Two methods may share an option, but one flag must not mean two keys."""
    flags: dict[str, str] = {}
    for method in registry.methods():
        for field in fields(registry.drafter_class(method).Options):
            flag = field.metadata.get("flag", field.name)
            assert flags.setdefault(flag, field.name) == field.name
    assert set(flags) <= set(registry.keywords())


@pytest.mark.parametrize(
    ("config", "method", "k"),
    [
        (None, "none", "auto"),
        ({}, "none", "auto"),
        ({"method": "none"}, "none", "auto"),
        ({"method": "ngram", "num_speculative_tokens": 3}, "ngram", 3),
        ({"prompt_lookup_max": 3}, "ngram", "auto"),
        ({"model": "x"}, "draft_model", "auto"),
        ({"assistant_model": "x", "num_assistant_tokens": 7}, "draft_model", 7),
        ({"prompt_lookup_num_tokens": 9}, "ngram", 9),
        ({"prompt_lookup_num_tokens": 9, "max_matching_ngram_size": 3}, "ngram", 9),
        ({"method": "ngram", "num_speculative_tokens": "auto"}, "ngram", "auto"),
    ],
)
def test_reading_a_config(config, method, k):
    speculation = registry.parse(config)
    assert (speculation.method, speculation.common.num_speculative_tokens) == (method, k)


def test_aliases_reach_their_option():
    assert registry.parse({"assistant_model": "x"}).options.model == "x"
    assert registry.parse({"prompt_lookup_num_tokens": 9, "max_matching_ngram_size": 3}).options.longest == 3


def test_the_rules_by_name():
    for name, rule in (("standard", "rejection"), ("rejection", "rejection"), ("block", "block")):
        assert registry.parse({"method": "ngram", "rejection_sample_method": name}).common.rule == rule


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"method": "ngramm"}, "unknown method 'ngramm'; did you mean 'ngram'?"),
        ({"method": "magic"}, "unknown method 'magic'; known: "),
        ({"method": 3}, "method must be a name, not 3"),
        ({"method": "base"}, "unknown method 'base'"),
        ({"method": "ngram", "prompt_lookup_mx": 3}, "'prompt_lookup_mx'; did you mean 'prompt_lookup_max'?"),
        ({"method": "ngram", "model": "x"}, "method 'ngram' takes no draft model"),
        ({"method": "none", "prompt_lookup_max": 3}, "unknown option for method 'none'"),
        ({"num_speculative_tokens": 3}, "needs a method: one of "),
        ({"skip_layers": "1"}, "needs a method: one of layer_skip (on the command line"),
        ({"assistant_model": "x", "model": "y"}, "'assistant_model' and 'model' mean the same; give one"),
        ({"num_assistant_tokens": 3, "prompt_lookup_num_tokens": 4}, "mean the same; give one"),
        ({"method": "ngram", "num_speculative_tokens": -1}, "from 0 to 63 or auto, not -1"),
        ({"method": "ngram", "num_speculative_tokens": 64}, "from 0 to 63 or auto, not 64"),
        ({"method": "ngram", "num_speculative_tokens": 2.5}, "from 0 to 63 or auto, not 2.5"),
        ({"method": "ngram", "num_speculative_tokens": True}, "from 0 to 63 or auto, not True"),
        ({"method": "ngram", "rejection_sample_method": "blok"}, "did you mean 'block'?"),
    ],
)
def test_configs_that_cannot_be_meant(config, says):
    before = dict(config)
    with pytest.raises(OptionError) as caught:
        registry.parse(config)
    assert says in str(caught.value)
    assert config == before, "the caller's config was changed"

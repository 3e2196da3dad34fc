"""Options, flags and the mapping of `build`: what is wrong is told here, not on another machine."""

import os
import sys

import pytest
from click.testing import CliRunner

from pilotfish.cli import main
from pilotfish.errors import OptionError
from pilotfish.scale.environment import prepare
from pilotfish.scale.options import ScaleOptions
from pilotfish.scale.recipe import Recipe, read


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"replicas": 2}, "give --ray too"),
        ({"ray": True, "replicas": 0}, "replicas must be a whole number, 1 or more, not 0"),
        ({"ray": True, "replicas": True}, "replicas"),
        ({"ray": True, "min_replicas": 2}, "go together"),
        ({"ray": True, "min_replicas": 3, "max_replicas": 2}, "min_replicas 3 is more than max_replicas 2"),
        ({"ray": True, "min_replicas": 1, "max_replicas": 2, "replicas": 2}, "give one kind"),
        ({"ray": True, "cpus_per_replica": float("nan")}, "cpus_per_replica"),
        ({"ray": True, "ray_address": ""}, "ray_address"),
    ],
    ids=str,
)
def test_wrong_options(values, told):
    with pytest.raises(OptionError, match=told):
        ScaleOptions(**values)


def test_a_mapping_is_sorted_to_its_owners_and_texts_are_read():
    """Serve's command line hands on texts; its files hand on numbers."""
    args = {"model": "x", "method": "suffix", "num_speculative_tokens": "6", "max_num_seqs": "3", "replicas": "2"}
    recipe, serving, scale = read(args | {"quantization": "int8", "max_queue": 5, "access_log": "true"})
    assert recipe.model == "x" and recipe.speculative_config == {"method": "suffix", "num_speculative_tokens": 6}
    assert (recipe.num_seats, recipe.load.quantization, scale.replicas, scale.ray) == (3, "int8", 2, True)
    assert serving.max_queue == 5 and serving.access_log is True


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"replicsa": 2}, "did you mean 'replicas'"),
        ({"replicas": "two"}, "replicas 'two'"),
        ({"port": 8000}, "http_options"),
        ({"method": "ngarm"}, "did you mean 'ngram'"),
        ({"method": "ngram", "speculative_config": {"method": "suffix"}}, "given twice"),
        ({"speculative_config": "ngram"}, "must be a mapping"),
        ({"model": 5}, "model must be"),
    ],
    ids=str,
)
def test_a_wrong_mapping(args, told):
    with pytest.raises(OptionError, match=told):
        read(args)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["serve", "--replicas", "2"], "replicas says how to run on Ray: give --ray too"),
        (["serve", "--ray", "--min-replicas", "2"], "go together"),
        (["batch", "a", "b", "--max-replicas", "2", "--ray"], "go together"),
    ],
)
def test_a_wrong_flag_is_one_line(words, told):
    result = CliRunner().invoke(main, words)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert told in result.stderr


@pytest.mark.parametrize("words", [["serve", "--ray"], ["batch", "a", "b", "--ray"]])
def test_without_ray_the_extra_is_named(monkeypatch, words):
    for name in [name for name in sys.modules if name == "ray" or name.startswith(("ray.", "pilotfish.scale."))]:
        if name not in ("pilotfish.scale.options", "pilotfish.scale.recipe"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_AUTH_MODE"):
        monkeypatch.setenv(name, "")
    result = CliRunner().invoke(main, words)
    command = f"{words[0]} --ray"
    assert result.exit_code == 2
    assert result.stderr == f"pilotfish: {command} needs ray, which is not installed: pip install 'pilotfish[ray]'\n"


@pytest.mark.parametrize(("address", "alone"), [(None, True), ("auto", False), ("10.0.0.1:6379", False)])
def test_nothing_is_reported_and_a_cluster_of_our_own_is_only_ours(monkeypatch, address, alone):
    monkeypatch.setattr(os, "environ", {})
    prepare(ScaleOptions(ray=True, ray_address=address))
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" in os.environ) is alone
    assert (os.environ.get("RAY_AUTH_MODE") == "token") is alone


def test_a_recipe_makes_what_the_flags_would():
    recipe = Recipe(speculative_config={"method": "ngram"})
    assert recipe.num_seats == recipe.engine.max_num_seqs
    with pytest.raises(OptionError, match="unknown method"):
        Recipe(speculative_config={"method": "nothing"})

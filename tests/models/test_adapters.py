"""Adapters, merged and beside the weights, say what peft's own model says; those for another base are refused.

Random weights in float64, greedy and with seeds. The oracle is peft's model itself, without any cache of ours.
"""

import contextlib
import functools
import json
import re
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from pilotfish import LLM, SamplingParams
from pilotfish.cli import main
from pilotfish.drafters import registry
from pilotfish.errors import ModelError, OptionError
from pilotfish.models.adapters import AdaptedLM
from pilotfish.models.load import Loaded, from_objects, load
from pilotfish.models.options import LoadOptions
from pilotfish.paged.cache import KVCache
from tests.adversaries import method_config
from tests.fakes import drain, engine, oracle
from tests.models.lora import adapted, write_adapter
from tests.models.test_load import tokenizer
from tests.models.tiny import tiny_model, tiny_pair

pytest.importorskip("peft")
T5_MODULES = ["q", "v", "wo"]
PROMPT = [3, 41, 5, 17, 60, 22, 9, 3, 41, 5, 17]
GREEDY = SamplingParams(temperature=0, max_tokens=10)
SEEDED = SamplingParams(seed=7, max_tokens=10)
OTHER_NAME = re.compile(r"trained for .somebody/else., and the target is .*; if that is the same model under another")


def stock(wrapped: Any, source: Sequence[int] = ()) -> Any:
    """The logits behind a text, by a model of transformers or peft."""

    @functools.cache
    def logits_of(text: tuple[int, ...]) -> torch.Tensor:
        ids = {"input_ids": torch.tensor([text])}
        if source:
            ids = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([text])}
        with torch.inference_mode():
            return wrapped(**ids, use_cache=False).logits[0, -1]

    return lambda text: logits_of(tuple(text))


def texts(loaded: Loaded, adapter: str | None = None, **options: Any) -> list[tuple[int, ...]]:
    llm = LLM.from_model(loaded, **options)
    return [one.token_ids for one in llm.generate([PROMPT, PROMPT], [GREEDY, SEEDED], adapter=adapter)]


def expected(wrapped: Any) -> list[tuple[int, ...]]:
    return [oracle(stock(wrapped), PROMPT, params) for params in (GREEDY, SEEDED)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "Tiny-Llama"
    tiny_model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def law(base: Path) -> Path:
    return write_adapter(tiny_model(), base.parent / "law", "hub/tiny-llama")


@pytest.fixture(scope="module")
def wit(base: Path) -> Path:
    """Another one, for other layers' parts, with a scale of its own."""
    return write_adapter(
        tiny_model(), base.parent / "wit", str(base), seed=2, target_modules=["k_proj", "up_proj"], use_rslora=True
    )


# -- merged ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["auto", "hf"])
def test_a_merged_adapter_says_what_peft_says(base: Path, law: Path, implementation: Any):
    loaded = load(base, adapter=str(law), device="cpu", model_impl=implementation)
    assert loaded.model.info.name == f"{base}+law"
    right = expected(adapted(tiny_model()))
    assert texts(loaded) == right and right != expected(tiny_model()), "and without it, it would be another text"
    for method in ("ngram", "suffix", "layer_skip"):
        assert texts(loaded, method=method, num_speculative_tokens=4) == right
    draft = load(base, device="cpu")  # the base drafts for what was made of it
    assert texts(loaded, draft_model=draft, num_speculative_tokens=4) == right


@pytest.mark.parametrize("modules", [["embed_tokens"], ["lm_head"], ["q_proj", "lm_head", "embed_tokens"]])
def test_a_head_that_is_the_embedding_is_changed_alone(modules: list[str], tmp_path: Path):
    """peft would add the change to both. The head of a saved model is tied when it is loaded, so its weights are."""
    model: Any = tiny_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    adapter = write_adapter(tiny_model(tie_word_embeddings=True), tmp_path / "adapter", "", target_modules=modules)
    loaded = load(tmp_path / "base", adapter=str(adapter), device="cpu")
    assert loaded.model.info.implementation == "native"
    assert texts(loaded) == expected(adapted(tiny_model(tie_word_embeddings=True), target_modules=modules))


def test_matrices_that_come_whole_are_taken_over_when_merged(base: Path, tmp_path: Path):
    wrapped = adapted(tiny_model(), modules_to_save=["lm_head"])
    head = wrapped.base_model.model.lm_head.modules_to_save["default"]
    head.weight.data.normal_(generator=torch.Generator().manual_seed(5))
    wrapped.save_pretrained(tmp_path)
    assert texts(load(base, adapter=str(tmp_path), device="cpu")) == expected(wrapped)
    with pytest.raises(ModelError, match=r"whole matrices of its own \(.*lm_head.*\), so it cannot be kept beside"):
        load(base, adapters={"law": str(tmp_path)}, device="cpu")


def test_a_merged_adapter_is_quantised_with_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The cache tells the base, and each adapter, from the others."""
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    shape = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 112}
    folder = tmp_path / "base"
    tiny_model(dtype=torch.float32, **shape).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    adapter = write_adapter(tiny_model(dtype=torch.float32, **shape), tmp_path / "adapter", "base")
    wrapped = adapted(tiny_model(dtype=torch.float32, **shape))
    wrapped.merge_and_unload().save_pretrained(tmp_path / "by-hand")
    tokenizer().save_pretrained(tmp_path / "by-hand")
    options: dict[str, Any] = {"quantization": "int8", "device": "cpu"}
    plain = texts(load(folder, **options))
    for _ in range(2):
        loaded = load(folder, adapter=str(adapter), **options)
        assert loaded.model.info.quantization == "int8"
        assert texts(loaded) == texts(load(tmp_path / "by-hand", **options)) != plain
    assert texts(load(folder, **options)) == plain
    found = [path for path in (tmp_path / "cache").iterdir() if path.is_dir() and "int8" in path.name]
    assert len(found) == 3
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file({name: 2 * weight for name, weight in weights.items()}, adapter / "adapter_model.safetensors")
    assert texts(load(folder, adapter=str(adapter), **options)) != texts(load(tmp_path / "by-hand", **options))


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_encoder_decoder_models_take_adapters_too(kind: str, tmp_path: Path):
    """Merged and beside; two requests with one source and different adapters share nothing."""
    modules = T5_MODULES if kind == "t5" else ["q_proj", "v_proj", "fc2"]
    tiny_pair(kind, tied=True).save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    adapter = str(write_adapter(tiny_pair(kind, tied=True), tmp_path / "law", "", target_modules=modules))
    models = {None: tiny_pair(kind, tied=True), "law": adapted(tiny_pair(kind, tied=True), target_modules=modules)}
    right = {name: oracle(stock(model, PROMPT), [1], SEEDED) for name, model in models.items()}
    assert right["law"] != right[None]
    merged = LLM.from_model(load(tmp_path / "base", adapter=adapter, device="cpu"), method="ngram")
    assert merged.generate([PROMPT], SEEDED)[0].token_ids == right["law"]
    llm = LLM.from_model(load(tmp_path / "base", adapters={"law": adapter}, device="cpu"), method="layer_skip")
    asked = ["law", None, "law", None]
    found = llm.generate([PROMPT] * 4, SEEDED, adapter=asked)
    assert [one.token_ids for one in found] == [right[name] for name in asked]
    assert not llm.engine.cache._readings


def test_a_loaded_peft_model_is_taken_with_its_active_adapter():
    wrapped = adapted(tiny_model())
    assert texts(from_objects(wrapped)) == expected(wrapped) != expected(tiny_model())


# -- beside the weights ----------------------------------------------------------------------------------------------


@functools.cache
def oracles(names: tuple[str | None, ...]) -> list[Any]:
    made = {
        None: tiny_model(),
        "law": adapted(tiny_model()),
        "wit": adapted(tiny_model(), seed=2, target_modules=["k_proj", "up_proj"], use_rslora=True),
    }
    return [stock(made[name]) for name in names]


ASKED = ("law", None, "wit", "law", "wit", None)
PARAMS = [
    GREEDY,
    SEEDED,
    SamplingParams(seed=8, temperature=0.7, top_p=0.9, max_tokens=8),
    SamplingParams(seed=9, max_tokens=12),
    GREEDY,
    SamplingParams(seed=10, repetition_penalty=1.4, max_tokens=9),
]


@pytest.fixture(scope="module")
def both(base: Path, law: Path, wit: Path) -> Loaded:
    return load(base, adapters=[f"law={law}", f"wit={wit}"], device="cpu")


@pytest.mark.parametrize("method", ["ngram", "draft_model", "layer_skip", "eagle3"])
def test_requests_of_one_batch_have_their_own_adapters(both: Loaded, base: Path, method: str):
    """Together, then short of pages and rows; whatever drafts: the base itself, or its heads, among others."""
    assert isinstance(both.model, AdaptedLM) and both.model.info.adapters == ("law", "wit")
    right = [oracle(one, PROMPT, p) for one, p in zip(oracles(ASKED), PARAMS, strict=True)]
    build = registry.parse(method_config(method, Loaded(load(base, device="cpu").model, None))).build
    for options in ({}, {"max_num_batched_tokens": 8, "max_num_seqs": 3, "num_pages": 8}):
        found = engine(both.model, build, k=4, **options)
        requests = [found.add(PROMPT, p, adapter=name)[0] for name, p in zip(ASKED, PARAMS, strict=True)]
        drain(found)
        assert [tuple(request.output) for request in requests] == right
        assert found.num_failed_drafts == 0


@pytest.mark.parametrize("sound", [True, False])
def test_pages_are_shared_under_one_adapter_only(both: Loaded, sound: bool, monkeypatch: pytest.MonkeyPatch):
    """As the control, pages known by tokens alone."""
    opened = KVCache.open

    def careless(self: KVCache, sequence: str, tokens: Any, source: Any = (), adapter: str = "") -> int:
        found = opened(self, sequence, tokens, source)
        self._sequences[sequence].adapter = adapter
        return found

    if not sound:
        monkeypatch.setattr(KVCache, "open", careless)
    found, right = engine(both.model), []
    for name in (None, "law", "law", "wit"):
        (request,) = found.add(PROMPT, SEEDED, adapter=name)
        drain(found)
        right.append(tuple(request.output) == oracle(oracles((name,))[0], PROMPT, SEEDED))
    assert right == [True, sound, sound, sound]


@pytest.mark.parametrize("sound", [True, False])
def test_threads_that_share_adapters_wait_for_each_other(base: Path, law: Path, wit: Path, sound: bool):
    """An engine for each. As the control, without turns: whoever was last says which adapter is active."""
    loaded, names = load(base, adapters=[f"law={law}", f"wit={wit}"], device="cpu"), (None, "law", "wit")
    right = [oracle(one, PROMPT, SEEDED) for one in oracles(names)]
    model: Any = loaded.model
    forward = model.base.forward

    def slow(*args: Any, **more: Any) -> Any:
        time.sleep(0.002)  # the others get their chance
        return forward(*args, **more)

    model.base.forward = slow
    if not sound:
        model._turn.lock = contextlib.nullcontext()
    engines = [engine(loaded.model) for _ in names]
    requests = [one.add(PROMPT, SEEDED, adapter=name)[0] for one, name in zip(engines, names, strict=True)]
    threads = [threading.Thread(target=drain, args=(one,)) for one in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ([tuple(request.output) for request in requests] == right) == sound


def test_one_adapter_s_rows_are_one_pass_and_those_of_several_are_one_each(both: Loaded):
    passes: list[int] = []
    model: Any = both.model
    forward = model.base.forward
    model.base.forward = lambda batch, *args, **more: (passes.append(batch.num_rows), forward(batch, *args, **more))[1]
    try:
        for asked, expected_passes in ((["law"] * 3, [18]), (["law", None, "law"], [12, 6]), ([None] * 2, [12])):
            passes.clear()
            found = engine(both.model)
            for name in asked:
                found.add([1, 2, 3, 4, 5, 6], GREEDY, adapter=name)
            found.step()
            assert passes == expected_passes
    finally:
        del model.base.forward


def test_states_are_tapped_from_each_one_s_own_pass(both: Loaded):
    from pilotfish.paged.batch import Feed, lay_out

    model = both.model
    cache = model.new_cache(8)
    feeds = []
    for place, name in enumerate(["law", "", "wit"]):
        cache.open(str(place), PROMPT, adapter=name)
        cache.reserve(str(place), len(PROMPT))
        feeds.append(Feed(str(place), PROMPT[: 4 + place], 0, place))
    together = model.forward(lay_out(feeds, cache), cache, taps=(1,))
    alone = [model.forward(lay_out([feed], cache), cache, taps=(1,)) for feed in feeds]
    torch.testing.assert_close(together.taps[1], torch.cat([one.taps[1] for one in alone]))
    torch.testing.assert_close(together.logits_NV, torch.cat([one.logits_NV for one in alone]))
    assert together.taps[1].shape[0] == 15 and together.logits_NV.shape[0] == 3


def test_streams_and_lists_of_adapters(base: Path, law: Path):
    llm = LLM(base, adapters={"law": law}, device="cpu", method="ngram")
    right = [oracle(one, PROMPT, GREEDY) for one in oracles(("law", None))]
    (*_, last) = llm.stream(PROMPT, GREEDY, adapter="law")
    assert last.completion is not None and last.completion.token_ids == right[0]
    assert [one.token_ids for one in llm.generate([PROMPT] * 2, GREEDY, adapter=["law", None])] == right
    with pytest.raises(OptionError, match="2 prompts but 1 adapters"):
        llm.generate([PROMPT] * 2, GREEDY, adapter=["law"])
    with pytest.raises(OptionError, match="unknown adapter 'lwa'; did you mean 'law'"):
        llm.generate([PROMPT], GREEDY, adapter="lwa")
    with pytest.raises(OptionError, match="was loaded without adapters, so there is no 'law'"):
        LLM(base, device="cpu").generate([PROMPT], GREEDY, adapter="law")


def test_the_command_line_has_both_ways(base: Path, law: Path):
    words = ["generate", "w3 w41 w5", "-m", str(base), "--max-tokens", "9", "--json"]
    text = [
        json.loads(CliRunner().invoke(main, [*words, *more]).stdout)["token_ids"] for more in ([], ["--adapter", law])
    ]
    wrapped = (tiny_model(), adapted(tiny_model()))
    assert text == [list(oracle(stock(one), [3, 41, 5], replace(GREEDY, max_tokens=9))) for one in wrapped]
    for command in ("serve", "batch"):
        assert "--adapters NAME=FOLDER" in CliRunner().invoke(main, [command, "--help"]).stdout
    wrong = CliRunner().invoke(main, ["serve", "-m", str(base), "--adapters", "law", "--port", "0"])
    assert wrong.exit_code == 2 and "an adapter is given as NAME=FOLDER" in wrong.stderr


# -- refusals --------------------------------------------------------------------------------------------------------


def refused(base: Path, adapter: Path | str) -> str:
    """Both ways, with the same words."""
    with pytest.raises(ModelError) as merged:
        load(base, adapter=str(adapter), device="cpu")
    with pytest.raises(ModelError) as beside:
        load(base, adapters={"law": str(adapter)}, device="cpu")
    assert str(beside.value).replace("+law", "") == str(merged.value).replace("+law", "")
    assert str(adapter) in str(merged.value)
    return str(merged.value)


def test_an_adapter_that_names_another_base(base: Path, tmp_path: Path):
    adapter = write_adapter(tiny_model(), tmp_path / "law", "somebody/else")
    assert OTHER_NAME.search(told := refused(base, adapter)) and told.endswith(f"to {base.name!r}")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for name in (base.name, None, "", "x/models--hub--TINY-llama/snapshots/0f3"):  # the way out, and what is the same
        (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": name}))
        load(base, adapter=str(adapter), device="cpu")


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"hidden_size": 40}, r"its .*down_proj\.lora_B\.weight is \[40, 2\], where \[32, 2\] is wanted"),
        ({"num_hidden_layers": 4}, r"it has weights for .*layers\.3.*, which is not there"),
        ({"num_hidden_layers": 2}, r"it has no .*layers\.2.*"),
        ({"num_key_value_heads": 1}, r"v_proj\.lora_B\.weight is \[8, 2\], where \[16, 2\] is wanted"),
    ],
)
def test_an_adapter_of_another_shape(base: Path, tmp_path: Path, shape: dict[str, int], reason: str):
    """Layers that it lacks would be left as they are, and those that are too many dropped."""
    adapter = write_adapter(tiny_model(**shape), tmp_path / "law", base.name)
    told = refused(base, adapter)
    assert re.search(rf"adapter .*law is not for .*{base.name}: .*{reason}; choose an adapter", told), told


def test_an_adapter_for_another_family(base: Path, tmp_path: Path):
    adapter = write_adapter(tiny_pair("t5"), tmp_path / "law", "", target_modules=T5_MODULES)
    assert "cannot be put into" in refused(base, adapter)


@pytest.mark.parametrize("damage", ["config", "kind", "weights", "truncated", "nan", "json", "rank"])
def test_damaged_adapters(base: Path, law: Path, tmp_path: Path, damage: str):
    adapter = Path(shutil.copytree(law, tmp_path / "law"))
    config, weights = adapter / "adapter_config.json", adapter / "adapter_model.safetensors"
    fields = json.loads(config.read_text())
    match damage:
        case "config":
            config.unlink()
            expected = "is not an adapter: it has no adapter_config.json"
        case "weights":
            weights.unlink()
            expected = "is incomplete: it has no adapter_model.safetensors"
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-100])
            expected = "cannot be put into"
        case "nan":
            stored = load_file(weights)
            next(iter(stored.values()))[0, 0] = float("nan")
            save_file(stored, weights)
            expected = "is damaged: .* holds a NaN"
        case "json":
            config.write_text("{")
            expected = "adapter_config.json cannot be read: JSONDecodeError"
        case "kind":
            config.write_text(json.dumps({"peft_type": "IA3", "target_modules": ["q_proj"], "feedforward_modules": []}))
            expected = "is of type IA3; these are supported: LORA"
        case "rank":
            config.write_text(json.dumps(fields | {"r": 4}))
            expected = "is not for .*lora_A"
    assert re.search(expected, refused(base, adapter))


def test_names_that_lead_nowhere(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    def offline(name: str, **_options: object) -> None:
        raise OSError(f"no {name} here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    assert "there is no folder" in refused(base, tmp_path / "nowhere")
    assert "there is no folder of that name here, and the hub says OSError: no some/body here" in refused(
        base, "some/body"
    )


def test_an_adapter_s_folder_given_as_the_model(law: Path):
    with pytest.raises(ModelError, match="law is an adapter, not a model; name its base as the model"):
        load(law)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"adapters": "law=x"}, "must be a mapping"),
        ({"adapters": ["law"]}, "NAME=FOLDER"),
        ({"adapters": {"a.b": "x"}}, "no dot in NAME"),
        ({"adapters": ["a=x", "a=y"]}, "several adapters have one name; those given are called a"),
        ({"adapters": {"a": "x"}, "adapter": "y"}, "give one of the two"),
        ({"adapters": {"a": "x"}, "quantization": "int8"}, "quantization is 'int8'; merge one"),
        ({"adapters": {"a": "x"}, "model_impl": "native"}, "transformers' code, not by ours"),
        ({"adapter": ""}, "must name a folder"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], reason: str):
    with pytest.raises(OptionError, match=reason):
        LoadOptions(**options)


def test_without_peft(base: Path, law: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(OptionError, match=r"adapters need peft.*pip install 'pilotfish\[adapters\]'"):
        load(base, adapter=str(law), device="cpu")

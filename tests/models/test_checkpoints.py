"""Folders as people have them: half precision, tied heads, shards, and weights that other libraries quantised."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig

from pilotfish import LLM, SamplingParams
from pilotfish.errors import ModelError
from pilotfish.models.adapters import merged
from pilotfish.models.huggingface import HuggingFaceLM
from pilotfish.models.load import _wrap, from_objects, load
from pilotfish.models.options import LoadOptions
from tests.models.lora import write_adapter
from tests.models.test_load import tokenizer
from tests.models.tiny import tiny_model

PROMPT = [3, 41, 5, 17, 60, 22, 9]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def save(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    tokenizer().save_pretrained(folder)
    return folder


def said(model: Any) -> list[int]:
    """By transformers' own generate."""
    ids = torch.tensor([PROMPT], device=model.device)
    with torch.inference_mode():
        found: list[int] = model.generate(ids, max_new_tokens=12, do_sample=False)[0, len(PROMPT) :].tolist()
    return found


@pytest.mark.parametrize(
    ("implementation", "dtype", "tied"),
    [
        ("native", torch.bfloat16, True),
        ("native", torch.float16, False),
        ("native", torch.float32, True),
        ("hf", torch.bfloat16, False),
        ("hf", torch.float16, True),
        ("hf", torch.float32, False),
    ],
)
def test_a_folder_is_run_in_the_precision_it_is_stored_in(
    implementation: Any, dtype: torch.dtype, tied: bool, tmp_path: Path
):
    """In float32 the text is the stock model's; in half precision the self-check has compared the logits."""
    model = tiny_model(dtype=dtype, tie_word_embeddings=tied)
    loaded = load(save(model, tmp_path / "it"), device="cpu", model_impl=implementation)
    assert loaded.model.info.dtype == dtype and loaded.model.info.implementation == implementation
    llm = LLM.from_model(loaded, method="ngram", num_speculative_tokens=4)
    found = list(llm.generate([PROMPT], GREEDY)[0].token_ids)
    assert len(found) == 12
    if dtype == torch.float32:
        assert found == said(model)


@pytest.mark.parametrize("tied", [True, False])
def test_shards_are_put_together(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    shape = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 112}
    model = tiny_model(dtype=torch.float32, tie_word_embeddings=tied, **shape)
    folder = save(model, tmp_path / "it", max_shard_size="60KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    assert list(LLM(folder, device="cpu").generate([PROMPT], GREEDY)[0].token_ids) == said(model)
    assert load(folder, device="cpu", quantization="int8").model.info.quantization == "int8"
    shards[1].unlink()
    with pytest.raises(ModelError, match=rf"cannot be loaded.*{shards[1].name}"):
        load(folder, device="cpu")


# -- weights that are quantised already ------------------------------------------------------------------------------


def marked(method: str) -> Any:
    """A float model whose config says that it is quantised."""
    model = tiny_model(dtype=torch.float32)
    model.config.quantization_config = {"quant_method": method}
    return model


def test_they_are_left_to_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Our decoder would take the parameters for numbers; by its name it refuses."""
    model = marked("torchao")
    wrapped = _wrap(model, "folder", "it", LoadOptions(device="cpu"), None)
    assert isinstance(wrapped, HuggingFaceLM)
    del model.config.quantization_config
    assert _wrap(model, "folder", "it", LoadOptions(device="cpu"), None).info.implementation == "native", "the control"
    with pytest.raises(
        ModelError, match="native decoder: its weights are quantised already, by torchao; use model_impl"
    ):
        _wrap(marked("torchao"), "folder", "it", LoadOptions(device="cpu", model_impl="native"), None)


def test_products_that_depend_on_the_other_rows_are_refused():
    """LLM.int8 splits off a column for all rows if it is large in one."""
    model = tiny_model(dtype=torch.float32)
    model.config.quantization_config = BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(ModelError, match=r"8-bit products \(bitsandbytes\).*llm_int8_threshold=0"):
        from_objects(model, name="it")
    model.config.quantization_config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    from_objects(model, name="it")


def test_an_adapter_is_not_merged_into_them(tmp_path: Path):
    pytest.importorskip("peft")
    adapter = write_adapter(tiny_model(), tmp_path)
    with pytest.raises(ModelError, match=r"it is quantised already \(by gptq\).*keep it beside the weights"):
        merged(marked("gptq"), str(adapter), "it", [])


@pytest.mark.parametrize(("method", "package"), [("bitsandbytes", "bitsandbytes"), ("torchao", "torchao")])
def test_without_the_library_that_reads_them(method: str, package: str, tmp_path: Path):
    if importlib.util.find_spec(package) is not None:
        pytest.skip("it is installed")
    folder = save(tiny_model(dtype=torch.float32), tmp_path / "it")
    config = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": method, **({"load_in_8bit": True} if method == "bitsandbytes" else {})}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(ModelError, match=rf"it' cannot be loaded: .*{package}"):
        load(folder, device="cpu")


@pytest.mark.parametrize("kind", ["torchao", "bitsandbytes"])
def test_with_it(kind: str, tmp_path: Path):
    pytest.importorskip(kind)
    from transformers import AutoModelForCausalLM

    folder = save(tiny_model(dtype=torch.float32, hidden_size=64, intermediate_size=128, head_dim=16), tmp_path / "it")
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        settings: Any = TorchAoConfig(Int8WeightOnlyConfig())
    else:
        settings = BitsAndBytesConfig(load_in_4bit=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=settings)
    right = said(model)
    for method in ("ngram", "layer_skip"):
        llm = LLM.from_model(model, tokenizer(), method=method, num_speculative_tokens=4)
        assert list(llm.generate([PROMPT], GREEDY)[0].token_ids) == right

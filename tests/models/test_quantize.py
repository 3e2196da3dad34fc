"""Quantised weights on disk: made once, mapped afterwards, made again when they are for something else or damaged."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pilotfish.errors import ModelError, OptionError
from pilotfish.models import quantize
from pilotfish.models.decoder import Decoder
from pilotfish.models.huggingface import HuggingFaceLM
from pilotfish.models.load import LoadOptions, _wrap
from pilotfish.models.quantize import QuantisationError, key_of, quantise, read, stored

from .tiny import tiny_model

SHAPE: dict[str, Any] = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 112, "dtype": torch.float32}


class Maker:
    """Counts how often the float model was needed."""

    def __init__(self, seed: int = 0, **overrides: Any):
        self.num, self.seed, self.overrides, self.said = 0, seed, overrides, list[str]()

    def load(self) -> Any:
        self.num += 1
        return tiny_model(seed=self.seed, **SHAPE | self.overrides)

    def get(self, key: str = "k", bits: int = 8) -> quantize.Quantised:
        return stored(key, "some/model", bits, self.load, self.said.append)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path))
    return tmp_path


def test_made_once_and_mapped_afterwards(folder: Path) -> None:
    maker = Maker()
    first, second = maker.get(), maker.get()
    assert maker.num == 1 and len(maker.said) == 1
    fresh = quantise(maker.load(), 8)
    assert first.origin == second.origin == fresh.origin
    assert set(second.arrays) == set(fresh.arrays)
    for name, array in fresh.arrays.items():
        assert np.array_equal(second.arrays[name], array), name
        assert isinstance(second.arrays[name], np.memmap) and second.arrays[name].ctypes.data % 64 == 0
    assert second.num_bytes < 0.6 * sum(p.numel() * 4 for p in maker.load().parameters())


def test_other_weights_or_another_version_are_made_again_and_replace_the_old(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Maker().get("one")
    changed = Maker(seed=1)
    assert not np.array_equal(changed.get("two").arrays["0.qkv.weights"], Maker().get("two").arrays["0.o.weights"])
    assert changed.num == 1
    monkeypatch.setattr(quantize, "FORMAT", 99)
    changed.get("two")
    assert changed.num == 2
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 1
    changed.get("two", 4)
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 2  # int8 and int4 live side by side
    assert len(list(folder.glob("*.lock"))) == 2  # nothing is left of the others


def test_a_damaged_file_is_made_again(folder: Path) -> None:
    maker = Maker()
    maker.get()
    (file,) = folder.glob("*/weights.bin")
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(bytes(data))
    assert np.array_equal(maker.get().arrays["0.qkv.weights"], quantise(maker.load(), 8).arrays["0.qkv.weights"])
    assert "damaged" in maker.said[1]


def test_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a quantised model"):
        read(tmp_path)


def test_tied_embeddings_are_kept_once(folder: Path) -> None:
    assert "head.weights" in Maker().get("untied").arrays
    assert "head.weights" not in Maker(tie_word_embeddings=True).get("tied").arrays


def test_keys_tell_files_apart(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    before = key_of([file])
    assert key_of([file]) == before
    file.write_bytes(b"other")
    assert key_of([file]) != before


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"head_dim": 8}, "q_proj of layer 0 makes heads of 8"),
        ({"intermediate_size": 100}, "gate_proj of layer 0 has 100 outputs"),
        ({"kind": "gpt2"}, "family 'gpt2' is not one of"),
    ],
)
def test_what_cannot_be_quantised_is_named(model: dict[str, Any], reason: str) -> None:
    own = {} if "kind" in model else SHAPE
    with pytest.raises(QuantisationError, match=reason):
        quantise(tiny_model(**own | model), 8)


def test_broken_weights_are_named() -> None:
    model = tiny_model(**SHAPE)
    model.model.layers[1].mlp.down_proj.weight.data[3, 4] = float("nan")
    with pytest.raises(ModelError, match="1.down of LlamaForCausalLM cannot be quantised"):
        quantise(model, 8)


@pytest.mark.parametrize(
    ("vector", "name"), [("input_layernorm.weight", "1.norm_1"), ("self_attn.q_proj.bias", "1.qkv.bias")]
)
def test_broken_vectors_are_named(vector: str, name: str) -> None:
    model = tiny_model("qwen2", **SHAPE)
    dict(model.model.layers[1].named_parameters())[vector].data[3] = float("inf")
    with pytest.raises(ModelError, match=f"{name} of Qwen2ForCausalLM cannot be quantised: it holds a NaN"):
        quantise(model, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int5"}, "none, int8, int4, gguf, not 'int5'"),
        ({"model_impl": "jax"}, "auto, hf or native, not 'jax'"),
        ({"quantization": "int8", "model_impl": "hf"}, "needs our own decoder"),
        ({"quantization": "int8", "dtype": "bfloat16"}, "the rest is float32"),
        ({"quantization": "int4", "device": "cuda"}, "is for the CPU"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        LoadOptions(**options)


def test_whose_code_runs() -> None:
    assert isinstance(_wrap(tiny_model(), "x", "x", LoadOptions(), None), Decoder)
    assert isinstance(_wrap(tiny_model(), "x", "x", LoadOptions(model_impl="hf"), None), HuggingFaceLM)
    assert isinstance(_wrap(tiny_model("gpt2"), "x", "x", LoadOptions(), None), HuggingFaceLM)
    with pytest.raises(ModelError, match="model_impl='hf'"):
        _wrap(tiny_model("gpt2"), "x", "x", LoadOptions(model_impl="native"), None)

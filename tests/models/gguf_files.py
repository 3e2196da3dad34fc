"""Small GGUF files for tests: a tiny model's weights, quantised, with a tokenizer, written by the `gguf` package.

They know the format's names and llama.cpp's order of rotated rows; the one trick: what a file stands for is worked out
here, block by block, so a test's expectation owes nothing to the reader that is tested.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import pre_tokenizers

from tests.models.tiny import tiny_model

EOS = 5
SHAPE: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "eos_token_id": EOS,
    "dtype": torch.float32,
}
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
# Where a block has its float16; the other bytes may be anything.
HALVES = {
    Kind.Q4_0: (0,), Kind.Q4_1: (0, 2), Kind.Q5_0: (0,), Kind.Q5_1: (0, 2), Kind.Q8_0: (0,), Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.IQ4_XS: (0,),
}  # fmt: skip


def letters() -> tuple[list[str], list[str]]:
    """A byte-level vocabulary with a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("Ġ", "the")]
    return [*alphabet, *("".join(pair) for pair in merges)], [" ".join(pair) for pair in merges]


def random_rows(kind: Kind, outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Rows of a matrix of this type, bytes: any numbers, and scales of either sign about a thousandth."""
    rng = np.random.default_rng(seed)
    if kind not in HALVES:
        return gguf.quants.quantize(rng.standard_normal((outputs, inputs), np.float32), kind).view(np.uint8)
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (outputs, inputs // block, num_bytes), np.uint8)
    for place in HALVES[kind]:
        halves = (rng.standard_normal(blocks.shape[:2]) * 1e-3).astype(np.float16)
        blocks[..., place : place + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(outputs, -1)


def write_gguf(
    path: Path,
    kind: str = "llama",
    *,
    weights: Kind | Callable[[str], Kind] = Kind.Q8_0,
    tied: bool = False,
    shape: Mapping[str, Any] | None = None,
    change: Callable[[str, np.ndarray], np.ndarray | None] = lambda name, raw: raw,
    texts: Mapping[str, str] | None = None,
    numbers: Mapping[str, int | float] | None = None,
    eos: int | None = EOS,
    seed: int = 0,
    more: Mapping[str, np.ndarray] | None = None,
) -> Any:
    """Write the file; returns the transformers model that it stands for.

    weights: the type of all matrices, or a function of a tensor's name. change: a tensor's bytes to others, or None to
    leave it out. texts, more: further settings and tensors. numbers: settings of its architecture, instead of the
    model's own.
    """
    model = tiny_model(kind, seed=seed, tie_word_embeddings=tied, **SHAPE | dict(shape or {}))
    config, writer = model.config, gguf.GGUFWriter(path, kind)
    tokens, merges = letters()
    writer.add_name("a tiny one")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    width = config.hidden_size // config.num_attention_heads
    if kind == "qwen3":
        width = config.head_dim
        writer.add_key_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(merges)
    if eos is not None:
        writer.add_eos_token_id(eos)
    names = gguf.get_tensor_name_map(ARCHITECTURES[kind], config.num_hidden_layers)
    state = model.state_dict()
    for name, weight in list(state.items()):
        if tied and name == "lm_head.weight":
            continue
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        data = weight.numpy()
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        turned = kind == "llama" and ("q_proj" in name or "k_proj" in name)
        if turned:
            data = _interleaved(data, heads)
        wanted = weights(own) if callable(weights) else weights
        stored = Kind.F32 if data.ndim == 1 else wanted
        try:
            raw = gguf.quants.quantize(data, stored)
        except NotImplementedError:
            raw = random_rows(stored, *data.shape)
        meant = gguf.quants.dequantize(raw, stored)
        state[name].copy_(torch.from_numpy(_halves(meant, heads) if turned else meant))
        if (changed := change(own, raw)) is not None:
            writer.add_tensor(own, changed, raw_dtype=stored)
    given: dict[str, tuple[Any, gguf.GGUFValueType]] = {
        **{key: (text, gguf.GGUFValueType.STRING) for key, text in (texts or {}).items()},
        **{
            f"{kind}.{key}": (
                number,
                gguf.GGUFValueType.UINT32 if isinstance(number, int) else gguf.GGUFValueType.FLOAT32,
            )
            for key, number in (numbers or {}).items()
        },
    }
    for key, (value, value_type) in given.items():
        writer.kv_data[0].pop(key, None)
        writer.add_key_value(key, value, value_type)
    for name, array in (more or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp turns neighbours against each other, transformers a head's halves."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    return weight.reshape(num_heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)

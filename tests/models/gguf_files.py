"""Small GGUF files for tests: a tiny model's weights, quantised, with a tokenizer, written by the `gguf` package.

They know the format's names and llama.cpp's order of rotated rows; the one trick: what a file stands for is worked out
here, block by block, so a test's expectation owes nothing to the reader that is tested.
"""

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
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}


def letters() -> tuple[list[str], list[str]]:
    """A byte-level vocabulary with a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("Ġ", "the")]
    return [*alphabet, *("".join(pair) for pair in merges)], [" ".join(pair) for pair in merges]


def write_gguf(path: Path, kind: str = "llama", *, weights: Kind = Kind.Q8_0, tied: bool = False) -> Any:
    """Write the file; returns the transformers model that it stands for."""
    model = tiny_model(kind, tie_word_embeddings=tied, **SHAPE)
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
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(merges)
    writer.add_eos_token_id(EOS)
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
        stored = Kind.F32 if data.ndim == 1 else weights
        raw = gguf.quants.quantize(data, stored)
        writer.add_tensor(own, raw, raw_dtype=stored)
        meant = gguf.quants.dequantize(raw, stored)
        state[name].copy_(torch.from_numpy(_halves(meant, heads) if turned else meant))
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

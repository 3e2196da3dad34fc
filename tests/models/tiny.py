"""Tiny models of real architectures: transformers' own code, random weights, float64, made in milliseconds.

Nothing is downloaded and nothing global is touched: weights depend on ``seed`` alone. They are large enough that the
argmax depends on the whole context. Unless asked for, no token ends a text (``eos_token_id=...`` changes that).
"""

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedModel,
)

from pilotfish.decoding.source import Features

VOCAB_SIZE = 64
CONTEXT = 128

_LLAMA_SHAPED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": CONTEXT,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,  # tied random embeddings make a model repeat its last token
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_WITHOUT_GROUPS = {k: v for k, v in _LLAMA_SHAPED.items() if k not in ("num_key_value_heads", "head_dim")}
_GPT2_SHAPED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_positions": CONTEXT,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_BART_SHAPED: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": None,
}
_PAIRS: dict[str, dict[str, Any]] = {
    "t5": {
        "vocab_size": VOCAB_SIZE,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,  # far within the tests' texts
        "decoder_start_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    },
    "bart": {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT,
        **_BART_SHAPED,
        "forced_eos_token_id": None,
        "pad_token_id": 0,
    },
    "whisper": {
        "vocab_size": VOCAB_SIZE,
        "max_target_positions": CONTEXT,
        "max_source_positions": 10,
        "num_mel_bins": 6,
        **_BART_SHAPED,
        "begin_suppress_tokens": None,
        "pad_token_id": 0,
    },
}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_OWN: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 1.0},
    # Keys and values of different widths, none of them head_dim.
    "deepseek_v3": {
        "experts_implementation": "eager",
        "first_k_dense_replace": 1,
        "head_dim": 4,
        "kv_lora_rank": 16,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "topk_group": 1,
        "v_head_dim": 6,
    },
    "gemma2": {"sliding_window": 6, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 6, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 8},
    # Wider and fewer heads in the layers without a window; the last two use the keys of the first two.
    "gemma4_text": {
        "attention_k_eq_v": True,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "sliding_window": 6,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    "gpt_oss": {
        "experts_implementation": "eager",  # the default one has no float64
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_window": 6,
        "layer_types": _ALTERNATING,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "mistral": {"sliding_window": 6},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
}


def tiny_model(
    kind: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: Any
) -> PreTrainedModel:
    """A causal LM of this ``model_type`` with a vocabulary of 64 and a context of 128 tokens.

    overrides: fields of its config. seed: other seeds give unrelated weights.
    """
    return build(AutoConfig.for_model(kind, **_fields(kind) | overrides), seed=seed, dtype=dtype)


def tiny_pair(
    kind: str = "t5", *, seed: int = 0, dtype: torch.dtype = torch.float64, tied: bool = False, **overrides: Any
) -> PreTrainedModel:
    """An encoder-decoder of this ``model_type`` with 2 + 3 layers, a vocabulary of 64, and its start token 1.

    tied: whether its head is its embedding; then it repeats its last token often.
    """
    fields = _PAIRS[kind if kind == "whisper" else "bart" if kind in ("bart", "marian", "mbart", "pegasus") else "t5"]
    model: Any = build(AutoConfig.for_model(kind, **fields | overrides), seed=seed, dtype=dtype, pair=True)
    for name, weight in model.named_parameters():
        if name.endswith("out_proj.weight"):  # else all that is seen drowns the last token, behind every norm
            weight.data *= 0.3
    for module in model.modules():
        if hasattr(module, "create_weight"):  # sinusoids, which are not saved
            module.weight.data.copy_(module.create_weight())
    generator = torch.Generator().manual_seed(seed)
    if not tied:
        head = model.get_output_embeddings()
        weight = 0.3 * torch.randn(head.weight.shape, generator=generator, dtype=torch.float64)
        head.weight = nn.Parameter(weight.to(dtype))
    if (bias := getattr(model, "final_logits_bias", None)) is not None:
        bias.normal_(0, 0.5, generator=generator)
    return model


def sound(seed: int = 0, num_bins: int = 6, num_frames: int = 20) -> Features:
    """What a tiny Whisper hears."""
    generator = torch.Generator().manual_seed(seed)
    return Features(torch.randn(num_bins, num_frames, generator=generator, dtype=torch.float64))


def build(config: Any, *, seed: int = 0, dtype: torch.dtype = torch.float64, pair: bool = False) -> PreTrainedModel:
    """A causal LM of this config with random weights; pair: an encoder-decoder."""
    with torch.random.fork_rng(devices=[]):  # initialising draws from the global generator
        hears = config.model_type == "whisper"
        kind = AutoModelForSpeechSeq2Seq if hears else AutoModelForSeq2SeqLM if pair else AutoModelForCausalLM
        model = kind.from_config(config)
    model = model.double().eval()
    generator = torch.Generator().manual_seed(seed)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.data.normal_(0, 0.1, generator=generator)
        elif weight.dim() > 1:
            weight.data.normal_(0, 1.0 if id(weight) in tables else 0.3, generator=generator)
        else:  # norms
            weight.data.uniform_(0.5, 1.5, generator=generator)
    return model.to(dtype)


def _fields(kind: str) -> dict[str, Any]:
    if kind in ("gpt2", "gpt_bigcode"):
        return dict(_GPT2_SHAPED)
    base = _WITHOUT_GROUPS if kind in ("gpt_neox", "opt") else _LLAMA_SHAPED
    return base | _OWN.get(kind, {})

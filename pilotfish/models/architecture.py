"""What our own decoder knows of a model: sizes, and the weights under our names, read off a loaded Hugging Face model.

It does not run anything. The one trick: facts are read from the modules that transformers built (windows, scales,
rotations, norms), not worked out from the config a second time; a module that we do not know is a reason to leave the
model to `huggingface`.

Families: llama, mistral, qwen2, qwen3, gemma3_text. A layer is

    x += post_1(attention(norm_1(x)))      q and k may have norms of their own; post norms are Gemma's
    x += post_2(mlp(norm_2(x)))            mlp(x) = down(activation(gate(x)) * up(x))
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..paged.cache import LayerShape

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_FIXED_ROTATIONS = {"default", "linear", "llama3", "yarn"}  # the others change with the length of the text


@dataclass(frozen=True, slots=True)
class Architecture:
    """Facts of a Llama-shaped decoder.

    windows, rotations: per layer, how far back it sees (None: all) and which table of inverse frequencies turns its
    queries and keys. rotation_scales: per table, the factor on cosines and sines. float_norms: norm weights are
    multiplied before rounding to the model's type (Gemma), not after.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_heads: int
    head_dim: int
    context: int
    norm_epsilon: float
    attention_scale: float
    embedding_scale: float
    activation: str
    windows: tuple[int | None, ...]
    rotations: tuple[int, ...]
    rotation_scales: tuple[float, ...]
    tied: bool
    float_norms: bool

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        return (LayerShape(self.num_key_heads, self.head_dim, self.head_dim),) * self.num_layers

    @property
    def num_projected(self) -> int:
        """Outputs of the fused product for queries, keys and values."""
        return (self.num_heads + 2 * self.num_key_heads) * self.head_dim

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Architecture":
        """Raises TypeError if fields are missing or unknown."""
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return cls(**{**fields, **lists})


def unsupported(config: Any) -> str | None:
    """Why a model of this config is not for our decoder, in words; None if it is."""
    family = str(getattr(config, "model_type", ""))
    if family not in FAMILIES:
        return f"family {family!r} is not one of {', '.join(FAMILIES)}"
    if (method := quantised_by(config)) is not None:
        return f"its weights are quantised already, by {method}"
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    if activation not in _ACTIVATIONS:
        return f"activation {activation!r} is not one of {', '.join(_ACTIVATIONS)}"
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, key, None):
            return f"{key} is set"
    if getattr(config, "use_bidirectional_attention", False):
        return "use_bidirectional_attention is set"
    rotations = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rotations.values() if isinstance(value, Mapping)]
    for rotation in nested or [rotations]:
        kind = rotation.get("rope_type", "default")
        if kind not in _FIXED_ROTATIONS:
            return f"rotations of type {kind!r} change with the length of the text"
        if rotation.get("partial_rotary_factor", 1.0) != 1.0:
            return "only a part of each head is rotated"
    return None


def quantised_by(config: Any) -> str | None:
    """The library or method that a checkpoint was quantised with, in transformers' name for it; None if it was not."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, Mapping) else getattr(settings, "quant_method", None)
    return str(getattr(method, "value", method) or "an unknown method")


def describe(model: Any) -> Architecture:
    """The facts of a loaded causal LM. Raises ModelError for one that is not Llama-shaped."""
    config = model.config.get_text_config()
    reason = unsupported(config)
    if reason is not None:
        raise ModelError(f"{type(model).__name__} does not fit the native decoder: {reason}; use model_impl='hf'")
    body, blocks = model.model, list(model.model.layers)
    names = _rotation_names(body.rotary_emb)
    attentions = [block.self_attn for block in blocks]
    embedding_scale = getattr(body.embed_tokens, "embed_scale", None)
    head = model.lm_head.weight
    return Architecture(
        family=config.model_type,
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        intermediate_size=int(config.intermediate_size),
        num_heads=int(config.num_attention_heads),
        num_key_heads=int(config.num_key_value_heads),
        head_dim=int(attentions[0].head_dim),
        context=int(config.max_position_embeddings),
        norm_epsilon=float(config.rms_norm_eps),
        attention_scale=float(attentions[0].scaling),
        embedding_scale=1.0 if embedding_scale is None else float(embedding_scale.to(head.dtype)),
        activation=_ACTIVATIONS[getattr(config, "hidden_activation", None) or config.hidden_act],
        windows=tuple(_window(attention, config) for attention in attentions),
        rotations=tuple(names.index(_rotation_of(attention, names)) for attention in attentions),
        rotation_scales=tuple(float(getattr(body.rotary_emb, f"{name}attention_scaling")) for name in names),
        tied=head.data_ptr() == body.embed_tokens.weight.data_ptr(),
        float_norms=config.model_type.startswith("gemma"),
    )


def weights(model: Any, architecture: Architecture) -> Iterator[tuple[str, list[Tensor]]]:
    """The weights under our names, each as the parts that are to be laid end to end; biases as ``name.bias``.

    Names: embedding, head (unless tied), norm, frequencies.0, ..., and per layer ``3.qkv``, ``3.o``, ``3.gate_up``,
    ``3.down``, ``3.norm_1``, ``3.norm_2``, and where there are such ``3.post_1``, ``3.post_2``, ``3.q_norm``,
    ``3.k_norm``.
    """
    body = model.model
    yield "embedding", [body.embed_tokens.weight]
    if not architecture.tied:
        yield "head", [model.lm_head.weight]
    yield "norm", [_norm(body.norm, architecture)]
    for i, name in enumerate(_rotation_names(body.rotary_emb)):
        yield f"frequencies.{i}", [getattr(body.rotary_emb, f"{name}inv_freq")]
    for i, block in enumerate(body.layers):
        attention, mlp = block.self_attn, block.mlp
        for name, parts in {
            "qkv": (attention.q_proj, attention.k_proj, attention.v_proj),
            "o": (attention.o_proj,),
            "gate_up": (mlp.gate_proj, mlp.up_proj),
            "down": (mlp.down_proj,),
        }.items():
            yield f"{i}.{name}", [part.weight for part in parts]
            if any(part.bias is not None for part in parts):
                yield f"{i}.{name}.bias", [_bias(part) for part in parts]
        for name, norm in _norms(block).items():
            yield f"{i}.{name}", [_norm(norm, architecture)]


def _norms(block: Any) -> dict[str, nn.Module]:
    attention = block.self_attn
    found = {"norm_1": block.input_layernorm}
    if hasattr(block, "pre_feedforward_layernorm"):
        found["norm_2"] = block.pre_feedforward_layernorm
        found["post_1"], found["post_2"] = block.post_attention_layernorm, block.post_feedforward_layernorm
    else:
        found["norm_2"] = block.post_attention_layernorm
    for name in ("q_norm", "k_norm"):
        if getattr(attention, name, None) is not None:
            found[name] = getattr(attention, name)
    return found


def _norm(module: Any, architecture: Architecture) -> Tensor:
    weight: Tensor = module.weight.detach()
    return 1.0 + weight.float() if architecture.float_norms else weight


def _bias(linear: Any) -> Tensor:
    bias: Tensor = linear.weight.new_zeros(linear.weight.shape[0]) if linear.bias is None else linear.bias
    return bias


def _window(attention: Any, config: Any) -> int | None:
    # Mistral keeps its window in the config alone.
    window = attention.sliding_window if hasattr(attention, "sliding_window") else None
    if config.model_type == "mistral":
        window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)


def _rotation_names(rotary: Any) -> list[str]:
    """Prefixes of the buffers of inverse frequencies: [""], or one per type of layer."""
    found = [name.removesuffix("inv_freq") for name, _ in rotary.named_buffers() if name.endswith("inv_freq")]
    return sorted(name for name in found if not name.endswith("original_"))


def _rotation_of(attention: Any, names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{attention.layer_type}_"


def fused(parts: list[Tensor]) -> Tensor:
    """The parts as one tensor."""
    return parts[0].detach() if len(parts) == 1 else torch.cat([part.detach() for part in parts])


def eos_ids(model: Any) -> frozenset[int]:
    """The ids that end a text, as the model's own settings say."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config.get_text_config(), "eos_token_id", None)
    return frozenset([eos] if isinstance(eos, int) else eos or ())

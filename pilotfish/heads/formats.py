"""Heads as other programs' configs and tensors: EAGLE-3 as the package `speculators` writes it (0.9), Medusa as vLLM.

It does not know files. The one trick: a head's own names are few (products of the same input are one), and a table says
which of the format's tensors lie end to end in each.

`eagle_aux_hidden_state_layer_ids` counts, as vLLM does, layers by their *inputs*: our tap 1, the output of layer 1, is
their 2. `d2t` holds offsets; it and `t2d` are left out where the draft vocabulary is the whole one. The embedding is
left out where it is the target's: `speculators` and vLLM both take the target's then.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import DraftError
from .eagle3 import Eagle3Config, Eagle3Head, default_taps
from .medusa import MedusaConfig, MedusaHeads

_ATTENTION, _MLP = "layers.0.self_attn", "layers.0.mlp"
_EAGLE3 = {
    "fc": ["fc"],
    "embedding_norm": ["layers.0.input_layernorm"],
    "hidden_norm": ["layers.0.hidden_norm"],
    "qkv": [f"{_ATTENTION}.{name}_proj" for name in "qkv"],
    "q_norm": [f"{_ATTENTION}.q_norm"],
    "k_norm": [f"{_ATTENTION}.k_norm"],
    "out": [f"{_ATTENTION}.o_proj"],
    "mlp_norm": ["layers.0.post_attention_layernorm"],
    "gate_up": [f"{_MLP}.gate_proj", f"{_MLP}.up_proj"],
    "down": [f"{_MLP}.down_proj"],
    "norm": ["norm"],
    "lm_head": ["lm_head"],
    "input_norm": ["input_norm"],
}
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def eagle3_json(config: Eagle3Config, verifier: Mapping[str, Any], num_tokens: int = 5) -> dict[str, Any]:
    """The config. verifier: ``name_or_path`` and ``architectures`` of the target."""
    rope = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
    layer = {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_key_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_epsilon,
        "max_position_embeddings": config.context,
        "rope_parameters": rope,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    if not config.qk_norm:
        layer["mlp_bias"] = False
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_tokens}],
            "verifier": dict(verifier),
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size,
        **{flag: getattr(config, flag) for flag in _FLAGS},
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
        "tie_word_embeddings": False,
        "dtype": "float16",
    }


def eagle3_config(json: Mapping[str, Any], num_layers: int) -> Eagle3Config:
    """The other way round. num_layers: the target's. Raises DraftError for what such a head has and ours has not;
    KeyError, TypeError or ValueError if it is no such config."""
    layer = json["transformer_layer_config"]
    family = layer.get("model_type", "qwen3")
    for what, odd in {
        f"layers of type {family!r}": family not in ("llama", "qwen3"),
        f"{layer.get('num_hidden_layers', 1)} layers": layer.get("num_hidden_layers", 1) != 1,
        f"activation {layer.get('hidden_act')!r}": layer.get("hidden_act", "silu") not in ("silu", "swish"),
        "biases": bool(layer.get("attention_bias")) or bool(layer.get("mlp_bias")),
        "a sliding window": "sliding_attention" in (layer.get("layer_types") or ()),
        f"states of width {json.get('target_hidden_size')}": (
            json.get("target_hidden_size") not in (None, layer["hidden_size"])
        ),
    }.items():
        if odd:
            raise DraftError(f"EAGLE-3 heads with {what} are not supported")
    rope = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    theta = float(rope.pop("rope_theta", None) or layer.get("rope_theta") or 10000.0)
    ids = json.get("eagle_aux_hidden_state_layer_ids")
    taps = default_taps(num_layers) if not ids else tuple(int(number) - 1 for number in ids)
    if not all(0 <= tap < num_layers for tap in taps):
        raise DraftError(
            f"eagle_aux_hidden_state_layer_ids {list(ids or ())} are not 1 to {num_layers}, the target's layers"
        )
    heads = int(layer["num_attention_heads"])
    return Eagle3Config(
        hidden_size=int(layer["hidden_size"]),
        intermediate_size=int(layer["intermediate_size"]),
        num_heads=heads,
        num_key_heads=int(layer.get("num_key_value_heads") or heads),
        head_dim=int(layer.get("head_dim") or layer["hidden_size"] // heads),
        vocab_size=int(layer["vocab_size"]),
        draft_vocab_size=int(json["draft_vocab_size"]),
        taps=taps,
        norm_epsilon=float(layer.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=None if rope.get("rope_type", "default") == "default" else rope,
        context=int(layer.get("max_position_embeddings", 2048)),
        qk_norm=family == "qwen3",
        **{flag: bool(json.get(flag, False)) for flag in _FLAGS},
    )


def eagle3_tensors(head: Eagle3Head) -> dict[str, Tensor]:
    """What goes into the file, by the format's names."""
    state = head.state_dict()
    found: dict[str, Tensor] = {}
    for own, names in _parts(head.config).items():
        sizes = _sizes(head.config, own)
        parts = [state[f"{own}.weight"]] if sizes is None else list(state[f"{own}.weight"].split(sizes))
        found |= {f"{name}.weight": part for name, part in zip(names, parts, strict=True)}
    if head.config.draft_vocab_size < head.config.vocab_size:
        found |= {"d2t": state["d2t"], "t2d": state["t2d"]}
    if "embed.weight" in state:
        found["embed_tokens.weight"] = state["embed.weight"]
    return found


def eagle3_head(config: Eagle3Config, tensors: Mapping[str, Tensor], embed: Callable[[Tensor], Tensor]) -> Eagle3Head:
    """A head from the file's tensors, in float32. embed: the target's; the file's own is taken if it is another.

    Raises DraftError, naming it, for a tensor that is missing or has another shape than the config says.
    """
    ids, order = _draft_ids(config.draft_vocab_size, config.vocab_size, tensors.get("d2t"))
    own = None
    if (
        "embed_tokens.weight" in tensors
    ):  # a table too short would fail for some drawn ids, which is choosing among draws
        own = _tensor(tensors, "embed_tokens.weight", (config.vocab_size, config.hidden_size))
    if own is not None and _differs(own, embed):
        embed = torch.nn.Embedding(len(own), own.shape[1], _weight=own.float(), _freeze=True)
    head = Eagle3Head(config, embed, ids)
    state = head.state_dict()
    for name, names in _parts(config).items():
        sizes = _sizes(config, name) or [len(state[f"{name}.weight"])]
        parts = [
            _tensor(tensors, f"{one}.weight", (size, *state[f"{name}.weight"].shape[1:]))
            for one, size in zip(names, sizes, strict=True)
        ]
        state[f"{name}.weight"] = torch.cat(parts)
    if order is not None:
        state["lm_head.weight"] = state["lm_head.weight"][order]
    head.load_state_dict(state)
    return head


def medusa_json(config: MedusaConfig) -> dict[str, Any]:
    """The config; names are vLLM's where it has them."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "dtype": "float16",
    }


def medusa_config(json: Mapping[str, Any]) -> MedusaConfig:
    """Raises DraftError for what such heads have and ours have not; KeyError, TypeError or ValueError if it is no such
    config."""
    if json.get("num_hidden_layers", 1) != 1:
        raise DraftError(f"Medusa heads with {json['num_hidden_layers']} layers are not supported")
    if not json.get("original_lm_head", False):
        raise DraftError("Medusa heads with output matrices of their own (original_lm_head false) are not supported")
    return MedusaConfig(
        hidden_size=int(json["hidden_size"]),
        vocab_size=int(json["vocab_size"]),
        draft_vocab_size=int(json.get("truncated_vocab_size") or json["vocab_size"]),
        num_heads=int(json["num_heads"]),
    )


def medusa_tensors(heads: MedusaHeads) -> dict[str, Tensor]:
    """One layer per head; the output matrix is the target's and stays there."""
    state, count = heads.state_dict(), heads.config.num_heads
    found = {f"blocks.{i}.layers.0.weight": part for i, part in enumerate(state["blocks.weight"].chunk(count))}
    found |= {f"blocks.{i}.layers.0.bias": part for i, part in enumerate(state["blocks.bias"].chunk(count))}
    if heads.config.draft_vocab_size < heads.config.vocab_size:
        found |= {"d2t": state["d2t"], "t2d": state["t2d"]}
    return found


def medusa_heads(
    config: MedusaConfig, tensors: Mapping[str, Tensor], head_rows: Callable[[Tensor], Tensor]
) -> MedusaHeads:
    """Heads from the file's tensors, in float32. head_rows: see `pilotfish.models.base.Ends`. Raises DraftError."""
    ids, _ = _draft_ids(config.draft_vocab_size, config.vocab_size, tensors.get("d2t"))
    output_VD = head_rows(torch.arange(config.vocab_size) if ids is None else torch.tensor(ids)).float()
    heads, width = MedusaHeads(config, output_VD, ids), config.hidden_size
    names = [f"blocks.{i}.layers.0" for i in range(config.num_heads)]
    with torch.no_grad():
        heads.blocks.weight.copy_(torch.cat([_tensor(tensors, f"{name}.weight", (width, width)) for name in names]))
        heads.blocks.bias.copy_(torch.cat([_tensor(tensors, f"{name}.bias", (width,)) for name in names]))
    return heads


def _parts(config: Eagle3Config) -> dict[str, list[str]]:
    """Our names and the format's, of what a head of this config has."""
    absent = {
        "q_norm": not config.qk_norm,
        "k_norm": not config.qk_norm,
        "input_norm": not config.norm_before_fc,
    }
    found = {own: names for own, names in _EAGLE3.items() if not absent.get(own, False)}
    if config.fc_norm:
        found |= {f"fc_norms.{i}": [f"fc_norm.{i}"] for i in range(len(config.taps))}
    return found


def _sizes(config: Eagle3Config, own: str) -> list[int] | None:
    """Outputs of the parts that one of our products joins; None if it is one of theirs."""
    if own == "qkv":
        keys = config.num_key_heads * config.head_dim
        return [config.num_heads * config.head_dim, keys, keys]
    return [config.intermediate_size] * 2 if own == "gate_up" else None


def _tensor(tensors: Mapping[str, Tensor], name: str, shape: Sequence[int]) -> Tensor:
    if name not in tensors:
        raise DraftError(f"it has no tensor {name}")
    if tensors[name].shape != tuple(shape):
        raise DraftError(f"its tensor {name} is {list(tensors[name].shape)}, and its config says {list(shape)}")
    return tensors[name].float()


def _draft_ids(size: int, num_ids: int, d2t: Tensor | None) -> tuple[list[int] | None, Tensor | None]:
    """The target's ids, ascending, and the order that brings the file's rows into theirs; None for what is trivial."""
    if d2t is None:
        if size != num_ids:
            raise DraftError(f"it has no tensor d2t, and its {size} draft ids are not the {num_ids} of the target")
        return None, None
    ids_N = d2t.long() + torch.arange(len(d2t))
    order = ids_N.argsort()
    ids_N = ids_N[order]
    if len(ids_N) != size or int(ids_N[0]) < 0 or int(ids_N[-1]) >= num_ids or bool((ids_N.diff() <= 0).any()):
        raise DraftError(f"its tensor d2t does not name {size} different ids from 0 to {num_ids - 1}")
    return ids_N.tolist(), None if bool((order == torch.arange(size)).all()) else order


def _differs(own_VD: Tensor, embed: Callable[[Tensor], Tensor]) -> bool:
    """Whether some rows of a table are not the target's, up to what rounding to int8 does to them."""
    rows_N = torch.linspace(0, len(own_VD) - 1, min(64, len(own_VD))).long()
    ours_ND, theirs_ND = embed(rows_N).float(), own_VD[rows_N].float()
    return ours_ND.shape != theirs_ND.shape or float((ours_ND - theirs_ND).norm()) > 0.03 * float(ours_ND.norm())

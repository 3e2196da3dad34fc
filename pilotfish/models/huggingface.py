"""Any Hugging Face causal LM on our paged cache: the oracle, and the fallback for every architecture.

It does not know architectures one by one. The one trick: transformers lets an attention function be registered by
name and hands unknown keyword arguments down to it; so the model runs its own code, with the whole ragged batch as
one row of a "sequence", no cache object of theirs, and our function reads and writes the pages.

A model may accept such a function and never call it (bloom does), or carry state that cannot be rolled back (Mamba).
Both are refused: by their flags, and by a self-check against the stock forward at load.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from ..attention import sdpa
from ..errors import ModelError
from ..paged.batch import Batch, Feed, lay_out
from ..paged.cache import KVCache, LayerShape
from .base import ModelInfo, ModelOutput

_NAME = "pilotfish"
_KNOWN_LAYERS = {"full_attention", "sliding_attention", "attention"}
_SELF_CHECK_TOKENS = 12
_LONGEST_SELF_CHECK = 64  # a window up to here is crossed by the check


class _Pass:
    """One running pass: what the attention function needs, handed down through the model's keyword arguments."""

    __slots__ = ("batch", "cache", "num_calls")

    def __init__(self, batch: Batch, cache: KVCache):
        self.batch, self.cache, self.num_calls = batch, cache, 0


def _paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    pilotfish_pass: _Pass | None = None,
    **_others: object,  # transformers passes what other implementations need (dropout, position_ids, ...)
) -> tuple[Tensor, None]:
    """transformers' attention signature: query [1, H, T, D], key and value [1, G, T, D]; returns [1, T, H, D]."""
    assert pilotfish_pass is not None, "this model does not hand keyword arguments down to its attention"
    batch, cache, layer = pilotfish_pass.batch, pilotfish_pass.cache, int(module.layer_idx)  # type: ignore[arg-type]
    pilotfish_pass.num_calls += 1
    keys, values = cache.keys[layer], cache.values[layer]
    keys[batch.slots_T] = key[0].transpose(0, 1)
    values[batch.slots_T] = value[0].transpose(0, 1)
    out_THD = sdpa.attend(
        query[0].transpose(0, 1),
        keys,
        values,
        batch,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks_H=s_aux,
    )
    return out_THD[None], None


AttentionInterface.register(_NAME, _paged_attention)


class HuggingFaceLM:
    """A `CausalLM` around a loaded `PreTrainedModel`. The model itself stays usable: our attention is switched on only
    while one of our passes runs.

    Raises ModelError for a model that cannot work, saying why.
    """

    def __init__(self, model: PreTrainedModel, name: str = "", *, self_check: bool = True):
        self.model: Any = model
        model.train(False)
        config: Any = model.config.get_text_config()
        self._config = config
        name = name or str(getattr(config, "name_or_path", "") or type(model).__name__)
        _refuse_what_cannot_work(model, config, name)
        weight: Any = model.get_input_embeddings().weight
        self.info = ModelInfo(
            name=name,
            architecture=type(model).__name__,
            vocab_size=int(config.vocab_size),
            context=_context(config),
            layers=_layer_shapes(model, config),
            hidden_size=int(config.hidden_size),
            num_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
            dtype=weight.dtype,
            device=weight.device,
            eos_ids=_eos_ids(model),
        )
        self._blocks = _blocks(model, len(self.info.layers))
        if self_check:
            self._self_check()

    def new_cache(self, num_pages: int, page_size: int = 16) -> KVCache:
        return KVCache(self.info.layers, num_pages, page_size, dtype=self.info.dtype, device=self.info.device)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache, *, taps: Sequence[int] = ()) -> ModelOutput:
        running = _Pass(batch, cache)
        with self._our_attention(), _tapping(self._blocks, taps) as tapped:
            output = self.model(
                input_ids=batch.tokens_T[None],
                position_ids=batch.positions_T[None],
                use_cache=False,
                logits_to_keep=batch.wanted_N,
                pilotfish_pass=running,
            )
        assert running.num_calls == len(self.info.layers), "a layer did not use our attention"
        return ModelOutput(output.logits[0], tapped)

    @contextmanager
    def _our_attention(self) -> Iterator[None]:
        config = self._config
        before = config._attn_implementation
        config._attn_implementation = _NAME
        try:
            yield
        finally:
            config._attn_implementation = before

    @torch.inference_mode()
    def _self_check(self) -> None:
        """The same short text through our path (in two chunks) and through the stock forward must agree."""
        info = self.info
        window = getattr(self._config, "sliding_window", None) or 0
        wanted = window + 4 if 0 < window <= _LONGEST_SELF_CHECK else _SELF_CHECK_TOKENS
        tokens = [(7 * i + 3) % info.vocab_size for i in range(min(wanted, info.context))]
        cache = self.new_cache(2, wanted)
        cache.open("check", tokens)
        cache.reserve("check", len(tokens))
        ours, done, half = [], 0, max(1, len(tokens) // 2)
        try:
            for chunk in (tokens[:half], tokens[half:]):
                batch = lay_out([Feed("check", chunk, done, len(chunk))], cache, info.device)
                ours.append(self.forward(batch, cache).logits_NV)
                done += len(chunk)
            stock_NV = self.model(input_ids=torch.tensor([tokens], device=info.device), use_cache=False).logits[0]
        except (AssertionError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ModelError(f"{info.name}: {info.architecture} does not run with paged attention: {error}") from error
        ours_NV, stock_NV = torch.cat(ours).double(), stock_NV.double()
        scale = float(stock_NV.abs().max().clamp(min=1.0))
        error_size = float((ours_NV - stock_NV).abs().max()) / scale
        tolerance = {torch.float64: 1e-5, torch.float32: 1e-3}.get(info.dtype, 0.1)
        if not error_size <= tolerance:  # a NaN fails too
            raise ModelError(
                f"{info.name}: {info.architecture} gives other logits with paged attention than without (relative "
                f"difference {error_size:.1e}, allowed {tolerance:.0e}); it keeps state or masks that cannot be served"
            )


def _refuse_what_cannot_work(model: PreTrainedModel, config: Any, name: str) -> None:
    kind = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name}: {kind} is an encoder-decoder model; decoder-only models are supported")
    kinds = set(getattr(config, "layer_types", None) or ()) | set(getattr(config, "layers_block_type", None) or ())
    if getattr(model, "_is_stateful", False) or kinds - _KNOWN_LAYERS:
        odd = ", ".join(sorted(kinds - _KNOWN_LAYERS)) or "recurrent state"
        raise ModelError(
            f"{name}: {kind} has layers that cannot be rolled back when a draft is rejected ({odd}); "
            "choose a model with attention layers only"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(
            f"{name}: {kind} does not support registered attention functions in this version of transformers "
            "(_supports_attention_backend is not set), so it cannot run on paged keys"
        )


def _context(config: Any) -> int:
    for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        value = getattr(config, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return 1 << 20


def _layer_shapes(model: PreTrainedModel, config: Any) -> tuple[LayerShape, ...]:
    heads = int(config.num_attention_heads)
    num_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return (LayerShape(num_heads, dim, dim),) * int(config.num_hidden_layers)


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config.get_text_config(), "eos_token_id", None)
    return frozenset([eos] if isinstance(eos, int) else eos or ())


def _blocks(model: PreTrainedModel, num_layers: int) -> list[nn.Module]:
    """The decoder layers in order: the first module list of the right length (where states can be tapped)."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    return []


@contextmanager
def _tapping(blocks: Sequence[nn.Module], layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the states [T, hidden] that leave these layers during the pass."""
    tapped: dict[int, Tensor] = {}
    handles = []
    for layer in layers:
        if not 0 <= layer < len(blocks):
            raise ModelError(f"layer {layer} cannot be tapped: the model has layers 0 to {len(blocks) - 1}")

        def take(_module: nn.Module, _inputs: object, output: Any, layer: int = layer) -> None:
            tapped[layer] = (output[0] if isinstance(output, tuple) else output)[0]

        handles.append(blocks[layer].register_forward_hook(take))
    try:
        yield tapped
    finally:
        for handle in handles:
            handle.remove()

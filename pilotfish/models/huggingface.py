"""Any Hugging Face causal LM on our paged cache: the oracle, and the fallback for every architecture.

It does not know architectures one by one. The one trick: transformers lets an attention function be registered by
name and hands unknown keyword arguments down to it; so the model runs its own code, with the whole ragged batch as
one row of a "sequence", no cache object of theirs, and our function reads and writes the pages.

Nothing is believed because a config says so. The shapes of keys and values are measured with one token; that the model
computes the same on pages is checked with two short texts against its stock forward. A model may accept our function
and never call it (bloom does), bring masks of its own, or carry state that cannot be rolled back (Mamba): refused.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from ..attention import sdpa
from ..decoding.source import Source
from ..errors import ModelError
from ..paged.batch import Batch, Feed, lay_out
from ..paged.cache import KVCache, LayerShape
from .architecture import eos_ids, quantised_by
from .base import CausalLM, Ends, ModelInfo, ModelOutput
from .dialects import stock_inputs
from .turns import Turn
from .vocabulary import DroppedLogits, with_part

_NAME, _MEASURING = "pilotfish", "pilotfish-measuring"
_LAST_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")  # transformers' names for it
_KNOWN_LAYERS = {"full_attention", "sliding_attention", "attention"}
_CHECK_TOKENS = (12, 9)
_SHORT_WINDOW, _LONGEST_CHECKED_WINDOW = 5, 64
# The largest error of a row's logits allowed in the self-check, relative to their spread. In float64 it is not smaller
# because transformers' eager attention rounds to float32 all the same. In bfloat16 rounding alone comes to 0.1, as it
# does with quantised weights, whose kernels multiply in it; a row that misses half of its keys is off by 0.4 to 2.5.
_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-3}
_COARSE_TOLERANCE = 0.3


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
    assert pilotfish_pass is not None, "it does not hand keyword arguments down to its attention"
    if attention_mask is not None:  # transformers makes none for a function like ours, so the model has its own rules
        raise ModelError(f"{type(module).__name__} brings an attention mask of its own")
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


class _Measured:
    """What one token's pass shows: per layer its attention module and the shapes to cache; kinds of keys."""

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.shapes: dict[int, LayerShape] = {}
        self.kinds: set[tuple[torch.dtype, torch.device]] = set()


def _measuring_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    pilotfish_measured: _Measured | None = None,
    **_others: object,
) -> tuple[Tensor, None]:
    """Like `_paged_attention`, for one token: what it sees in itself is its own value."""
    measured = pilotfish_measured
    assert measured is not None, "it does not hand keyword arguments down to its attention"
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or layer in measured.shapes:
        raise ModelError(f"{type(module).__name__} attends as layer {layer}, and every layer must attend just once")
    measured.modules[layer] = module
    measured.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
    measured.kinds.add((key.dtype, key.device))
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None


AttentionInterface.register(_NAME, _paged_attention)
AttentionInterface.register(_MEASURING, _measuring_attention)


class HuggingFaceLM:
    """A `CausalLM` around a loaded `PreTrainedModel`. The model itself stays usable: our attention is switched on only
    while one of our passes runs.

    Raises ModelError for a model that cannot work, saying why.
    """

    def __init__(self, model: PreTrainedModel, name: str = "", *, self_check: bool = True):
        self.model: Any = model
        self._turn = Turn()  # of passes: they swap parts of the model
        model.train(False)
        config: Any = model.config.get_text_config()
        self._config = config
        name = name or str(getattr(config, "name_or_path", "") or type(model).__name__)
        _refuse_what_cannot_work(model, config, name)
        measured = self._measure(name)
        ((dtype, device),) = measured.kinds
        self.info = ModelInfo(
            name=name,
            architecture=type(model).__name__,
            vocab_size=int(config.vocab_size),
            context=_context(config),
            layers=tuple(shape for _, shape in sorted(measured.shapes.items())),
            hidden_size=int(config.hidden_size),
            num_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
            dtype=dtype,
            device=device,
            eos_ids=eos_ids(model),
        )
        self._blocks = _blocks(model, measured)
        if self_check:
            with _short_windows(model, config):
                check_against_stock(self, model)

    def new_cache(self, num_pages: int, page_size: int = 16) -> KVCache:
        return KVCache(self.info.layers, num_pages, page_size, dtype=self.info.dtype, device=self.info.device)

    @torch.inference_mode()
    def forward(
        self, batch: Batch, cache: KVCache, *, taps: Sequence[int] = (), layers: Sequence[int] | None = None
    ) -> ModelOutput:
        running = _Pass(batch, cache)
        with (
            self._turn.lock,
            self._attention(_NAME),
            _running(self._blocks, layers),
            _tapping(self._blocks, taps) as tapped,
        ):
            output = self.model(
                input_ids=batch.tokens_T[None],
                position_ids=batch.positions_T[None],
                use_cache=False,
                logits_to_keep=batch.wanted_N,
                pilotfish_pass=running,
            )
        assert running.num_calls == len(self.info.layers if layers is None else layers), "not every layer is paged"
        logits = output.logits[0]
        if len(logits) != len(batch.wanted_N):  # some models do not know logits_to_keep and give every row's
            logits = logits[batch.wanted_N]
        return ModelOutput(logits, tapped)

    def with_head(self, ids: Sequence[int]) -> CausalLM:
        """See `vocabulary.with_head`. Of a model that keeps its head in an unusual place, logits are thrown away."""
        head: Any = self.model.get_output_embeddings()
        other = with_part(self.model, head, _rows_of(head, ids)) if type(head) is nn.Linear else None
        if other is None:
            return DroppedLogits(self, ids)
        twin = copy.copy(self)
        twin.model = other
        return twin

    def ends(self) -> Ends:
        table: Any = self.model.get_input_embeddings()
        head: Any = self.model.get_output_embeddings()
        norm = next((module for name in _LAST_NORMS if (module := getattr(self.model.base_model, name, None))), None)
        if table is None or head is None or norm is None:
            raise ModelError(f"{self.info.name}: it is not known what in {self.info.architecture} is the last norm")
        kind = head.weight.dtype
        return Ends(
            embed=lambda tokens_T: nn.functional.embedding(tokens_T, table.weight.detach()).float(),
            norm=torch.no_grad()(lambda states_TD: norm(states_TD.to(kind)).float()),
            head_rows=lambda ids_N: nn.functional.embedding(ids_N, head.weight.detach()).float(),
        )

    @contextmanager
    def _attention(self, name: str) -> Iterator[None]:
        """The model attends through this function, without dropout; whatever happens, as it did before afterwards."""
        config = self._config
        before = config._attn_implementation
        training = [module for module in self.model.modules() if module.training] if self.model.training else []
        config._attn_implementation = {"": name}  # a dict: the configs nested in this one are left alone
        try:
            for module in training:
                module.training = False
            yield
        finally:
            for module in training:
                module.training = True
            config._attn_implementation = {"": before}

    @torch.inference_mode()
    def _measure(self, name: str) -> _Measured:
        """One token through the model: what would its attention layers cache?"""
        measured = _Measured()
        ids_1T = torch.zeros(1, 1, dtype=torch.int64, device=self.model.get_input_embeddings().weight.device)
        with _explained(name, self.model), self._attention(_MEASURING):
            self.model(input_ids=ids_1T, position_ids=ids_1T, use_cache=False, pilotfish_measured=measured)
        num_layers = int(self._config.num_hidden_layers)
        if sorted(measured.shapes) != list(range(num_layers)):
            raise ModelError(
                f"{name}: {len(measured.shapes)} of {num_layers} layers of {type(self.model).__name__} attend through "
                "a registered function; what the others keep cannot be rolled back when a draft is rejected"
            )
        if len(measured.kinds) > 1:
            kinds = " and ".join(sorted(f"{dtype} on {device}" for dtype, device in measured.kinds))
            raise ModelError(f"{name}: keys are in {kinds}; load the model with one dtype on one device")
        return measured


def _rows_of(linear: nn.Linear, ids: Sequence[int]) -> nn.Linear:
    rows = torch.tensor(ids, device=linear.weight.device)
    with torch.device("meta"):  # nothing is made up only to be overwritten
        smaller = nn.Linear(linear.in_features, len(ids), linear.bias is not None)
    smaller.weight = nn.Parameter(linear.weight.detach()[rows], requires_grad=False)
    if linear.bias is not None:
        smaller.bias = nn.Parameter(linear.bias.detach()[rows], requires_grad=False)
    return smaller


@torch.inference_mode()
def check_against_stock(lm: CausalLM, model: Any) -> None:
    """Two short texts through our path, together and in two chunks each, must agree with their stock forwards.

    A window of up to 64 tokens is crossed. Raises ModelError if they do not, or if our path does not run at all.
    """
    info = lm.info
    window = getattr(model.config.get_text_config(), "sliding_window", None) or 0
    lengths = [n + (window if window <= _LONGEST_CHECKED_WINDOW else 0) for n in _CHECK_TOKENS]
    texts = [[(7 * i + 3 * n) % info.vocab_size for i in range(min(n, info.context))] for n in lengths]
    sources = [info.trial_source([(5 * i + n) % info.vocab_size for i in range(n - 2)]) for n in _CHECK_TOKENS]
    cache = lm.new_cache(len(texts), max(lengths))
    ours: list[list[Tensor]] = [[] for _ in texts]
    with _explained(info.name, model):
        stock = [model(**_inputs(text, source, info), use_cache=False).logits[0]
                 for text, source in zip(texts, sources, strict=True)]  # fmt: skip
        for number, (text, source) in enumerate(zip(texts, sources, strict=True)):
            cache.open(str(number), text, source)
            cache.reserve(str(number), len(text))
        for start, stop in ((0, 4), (4, max(lengths))):
            parts = [text[start:stop] for text in texts]
            feeds = [Feed(str(n), part, start, len(part)) for n, part in enumerate(parts) if part]
            if not feeds:  # a context of 4 tokens or less
                continue
            logits_NV = lm.forward(lay_out(feeds, cache, info.device), cache).logits_NV
            for feed, rows in zip(feeds, torch.split(logits_NV, [len(part) for part in parts if part]), strict=True):
                ours[int(feed.sequence)].append(rows)
    error = max(_difference(torch.cat(chunks), whole) for chunks, whole in zip(ours, stock, strict=True))
    coarse = quantised_by(model.config) is not None
    tolerance = _COARSE_TOLERANCE if coarse else _TOLERANCES.get(info.dtype, _COARSE_TOLERANCE)
    if not error <= tolerance:  # a NaN fails too
        raise ModelError(
            f"{info.name}: {info.architecture} gives other logits with paged attention than without (relative "
            f"difference {error:.1e}, allowed {tolerance:.0e}); it keeps state or masks that cannot be served"
        )


def _inputs(text: Sequence[int], source: Source, info: ModelInfo) -> dict[str, Tensor]:
    """What a stock forward reads; an encoder-decoder's is given the text as its decoder's."""
    ids_1T = torch.tensor([text], device=info.device)
    if not source:
        return {"input_ids": ids_1T}
    return {**stock_inputs(source, torch.empty(0, dtype=info.dtype, device=info.device)), "decoder_input_ids": ids_1T}


def _difference(ours_NV: Tensor, stock_NV: Tensor) -> float:
    """The worst row's root mean square error, relative to the spread of that row's logits."""
    ours_NV, stock_NV = ours_NV.double(), stock_NV.double()
    spread_N = stock_NV.std(1).clamp(min=1e-6)
    return float(((ours_NV - stock_NV).square().mean(1).sqrt() / spread_N).max())


@contextmanager
def _explained(name: str, model: nn.Module) -> Iterator[None]:
    """Whatever a model raises when it is run in a way it was not made for, in the user's terms."""
    try:
        yield
    except (AssertionError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{name}: {type(model).__name__} does not run with paged attention: {reason}") from error


@contextmanager
def _short_windows(model: nn.Module, config: Any) -> Iterator[None]:
    """Sliding windows cut to a few tokens, so that a short text shows how the model treats their edges."""
    owners: list[Any] = [config, *model.modules()]
    windows = [(owner, getattr(owner, "sliding_window", None)) for owner in owners]
    cut = [(owner, window) for owner, window in windows if isinstance(window, int) and window > _SHORT_WINDOW]
    for owner, _ in cut:
        owner.sliding_window = _SHORT_WINDOW
    try:
        yield
    finally:
        for owner, window in cut:
            owner.sliding_window = window


def _refuse_what_cannot_work(model: PreTrainedModel, config: Any, name: str) -> None:
    kind = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name}: {kind} is an encoder-decoder model; decoder-only models are supported")
    quantised = getattr(model.config, "quantization_config", None)
    if getattr(quantised, "load_in_8bit", False) and getattr(quantised, "llm_int8_threshold", 0):
        raise ModelError(
            f"{name}: its 8-bit products (bitsandbytes) treat a column apart if any row of a pass is large there, so a"
            " drafted token would change the others; load it with BitsAndBytesConfig(.., llm_int8_threshold=0)"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) | set(getattr(config, "layers_block_type", None) or ())
    if getattr(model, "_is_stateful", False) or kinds - _KNOWN_LAYERS:
        odd = ", ".join(sorted(kinds - _KNOWN_LAYERS)) or "recurrent state"
        raise ModelError(
            f"{name}: {kind} has layers that cannot be served from pages of keys and values, or not be rolled back "
            f"when a draft is rejected ({odd}); choose a model with full or sliding-window attention only"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(
            f"{name}: {kind} does not support registered attention functions in this version of transformers "
            "(_supports_attention_backend is not set), so it cannot run on paged keys"
        )


def _context(config: Any) -> int:
    """The longest text in tokens, as far as the model treats all lengths alike."""
    longest = 1 << 20
    for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        value = getattr(config, key, None)
        if isinstance(value, int) and value > 0:
            longest = value
            break
    # Beyond its original length, LongRoPE turns everything by other angles, and it goes by the longest text in the
    # pass: one request would change another, and cached keys were turned by the old angles.
    rope = getattr(config, "rope_parameters", None) or {}
    for own in (rope, *(entry for entry in rope.values() if isinstance(entry, dict))):
        if own.get("rope_type") == "longrope":
            original = own.get("original_max_position_embeddings")
            longest = min(longest, int(original or getattr(config, "original_max_position_embeddings", 0) or longest))
    return longest


def _blocks(model: PreTrainedModel, measured: _Measured) -> list[nn.Module]:
    """The decoder layers in order (where states can be tapped): the module list whose items hold the attentions."""
    attentions = [module for _, module in sorted(measured.modules.items())]
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(attentions):
            blocks = list(module)
            if all(own in set(block.modules()) for own, block in zip(attentions, blocks, strict=True)):
                return blocks
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


@contextmanager
def _running(blocks: Sequence[nn.Module], layers: Sequence[int] | None) -> Iterator[None]:
    """While this lasts, only these layers do anything. The others stay where they are, so every layer keeps its number
    (by which models choose windows and rotations), but hand on the states they get."""
    if layers is None:
        yield
        return
    chosen = set(layers)
    if odd := [layer for layer in layers if not 0 <= layer < len(blocks)]:
        raise ModelError(f"layer {odd[0]} cannot be run alone: the model has layers 0 to {len(blocks) - 1}")
    assert sorted(chosen) == list(layers), "layers ascend"
    skipped = [block for layer, block in enumerate(blocks) if layer not in chosen]
    replaced = [block.__dict__.get("forward") for block in skipped]  # some libraries hook in there too
    for block in skipped:
        block.__dict__["forward"] = _hand_on
    try:
        yield
    finally:
        for block, before in zip(skipped, replaced, strict=True):
            if before is None:
                del block.__dict__["forward"]
            else:
                block.__dict__["forward"] = before


def _hand_on(hidden_states: Tensor, *_args: object, **_kwargs: object) -> Tensor:
    return hidden_states

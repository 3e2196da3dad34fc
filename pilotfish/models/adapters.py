"""LoRA adapters: merged into a model's weights, or kept beside them and chosen by each request.

It does not know requests, drafters or engines. The one trick: whose rows are whose hangs on the sequence (the cache
knows its adapter), and a pass whose sequences want different adapters is run as a pass for each, over the same pages.
So what an adapter does inside of a layer is peft's own business, and nothing above this file has a second way to run.

    one pass    [ a: plain | b: "law" | c: plain | d: "law" ]   ->   plain: [ a | c ]   law: [ b | d ]

An adapter is for one base. That is checked by name, as far as both are known, and then by every weight's name and
shape: peft would fill in what is missing.
"""

import importlib.util
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelError, OptionError
from ..paged.batch import Batch, lay_out
from ..paged.cache import KVCache
from .architecture import quantised_by
from .base import CausalLM, Ends, ModelInfo, ModelOutput
from .demo import NAME as DEMO_NAME
from .turns import Turn

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_KINDS = ("LORA",)
_INSIDE = "base_model.model."  # what peft puts before the names of the base's modules


def adapter_folder(name: str) -> Path:
    """Where an adapter lies: a folder, or what is fetched for a hub id. Raises ModelError if it is no adapter."""
    path = Path(name).expanduser()
    if not path.exists():
        if path.is_absolute() or name.startswith((".", "~")):
            raise ModelError(f"there is no folder {path}")
        from huggingface_hub import snapshot_download

        try:
            path = Path(snapshot_download(name, allow_patterns=[_CONFIG, *_WEIGHTS]))
        except Exception as error:  # the hub raises a dozen unrelated kinds
            raise ModelError(
                f"adapter {name!r} cannot be loaded: there is no folder of that name here, and the hub says "
                f"{_first_line(error)}"
            ) from error
    if not (path / _CONFIG).is_file():
        raise ModelError(f"{path} is not an adapter: it has no {_CONFIG}")
    if not any((path / file).is_file() for file in _WEIGHTS):
        raise ModelError(f"adapter {path} is incomplete: it has no {_WEIGHTS[0]}")
    return path


def merged(model: Any, adapter: str, name: str, labels: Sequence[str]) -> Any:
    """The transformers model with an adapter's changes added to its weights; it is no longer the base.

    name: of the model, for messages. labels: all that it is known as, for comparing with what the adapter is for.
    Raises ModelError for an adapter that is not for this model, or that cannot be merged.
    """
    folder = adapter_folder(adapter)
    if (method := quantised_by(model.config)) is not None:
        raise ModelError(
            f"{name} is quantised already (by {method}), and to merge adapter {folder} would round both anew; keep it "
            "beside the weights (adapters=, or --adapters of serve)"
        )
    with _quiet():
        wrapped = _attach(model, folder, "default", name, labels)
        _untie(wrapped)
        try:
            return wrapped.merge_and_unload(safe_merge=True)
        except Exception as error:
            raise ModelError(f"adapter {folder} cannot be merged into {name}: {_first_line(error)}") from error


def beside(model: Any, adapters: Mapping[str, str], name: str, labels: Sequence[str]) -> Any:
    """peft's model around a transformers model, with these adapters (name: folder), none of them active; the model is
    still the base.

    Raises ModelError as `merged`, and for an adapter that brings whole matrices of its own.
    """
    wrapped = model
    with _quiet():
        for own, adapter in adapters.items():
            folder = adapter_folder(adapter)
            wrapped = _attach(wrapped, folder, own, name, labels, whole=False)
        for parameter in wrapped.parameters():
            parameter.requires_grad_(False)
        wrapped.base_model.disable_adapter_layers()
    return wrapped


class AdaptedLM:
    """A `CausalLM` whose sequences may each have an adapter: `KVCache.adapter` names it, "" is the base alone.

    base: runs the model that ``wrapped`` is around (see `beside`).
    """

    def __init__(self, base: CausalLM, wrapped: Any):
        self.base, self._wrapped = base, wrapped
        self.info: ModelInfo = replace(base.info, adapters=tuple(wrapped.peft_config))
        self._active = ""
        self._turn = Turn()  # of passes: which adapter is active is the model's state

    def new_cache(self, num_pages: int, page_size: int = 16) -> KVCache:
        return self.base.new_cache(num_pages, page_size)

    def forward(
        self, batch: Batch, cache: KVCache, *, taps: Sequence[int] = (), layers: Sequence[int] | None = None
    ) -> ModelOutput:
        with self._turn.lock:
            return self._forward(batch, cache, taps, layers)

    def _forward(self, batch: Batch, cache: KVCache, taps: Sequence[int], layers: Sequence[int] | None) -> ModelOutput:
        groups: dict[str, list[int]] = {}
        for place, span in enumerate(batch.spans):
            groups.setdefault(cache.adapter(span.feed.sequence), []).append(place)
        if len(groups) == 1:
            self._activate(next(iter(groups)))
            return self.base.forward(batch, cache, taps=taps, layers=layers)
        logits = [torch.empty(0)] * len(batch.spans)
        tapped = {layer: [torch.empty(0)] * len(batch.spans) for layer in taps}
        for own, places in groups.items():
            self._activate(own)
            feeds = [batch.spans[place].feed for place in places]
            part = lay_out(feeds, cache, self.info.device)
            output = self.base.forward(part, cache, taps=taps, layers=layers)
            _hand_out(output.logits_NV, [feed.num_wanted for feed in feeds], places, logits)
            for layer, states_TD in output.taps.items():
                _hand_out(states_TD, [len(feed.tokens) for feed in feeds], places, tapped[layer])
        return ModelOutput(torch.cat(logits), {layer: torch.cat(parts) for layer, parts in tapped.items()})

    def ends(self) -> Ends:
        return self.base.ends()

    def _activate(self, name: str) -> None:
        """Make an adapter the active one; walks over all layers, so only where another was."""
        if name == self._active:
            return
        if name:
            self._wrapped.base_model.set_adapter(name, inference_mode=True)
            self._wrapped.base_model.enable_adapter_layers()
        else:
            self._wrapped.base_model.disable_adapter_layers()
        self._active = name


def _hand_out(rows: torch.Tensor, counts: list[int], places: list[int], parts: list[torch.Tensor]) -> None:
    for place, part in zip(places, torch.split(rows, counts), strict=True):
        parts[place] = part


def labels_of(name: str, source: str, gguf_file: str | None, model: Any) -> list[str]:
    """All that a loaded model is known as: what its user calls it, its folder or file, what its config remembers."""
    if gguf_file is not None:
        return [name, gguf_file]
    known = [name, source, str(getattr(model.config, "name_or_path", "") or "")]
    if name == "demo":
        known.append(DEMO_NAME)
    try:
        config = json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
        known.append(str(config.get("_name_or_path") or ""))
    except (OSError, ValueError, AttributeError):
        pass
    return [label for label in known if label]


# -- inside ----------------------------------------------------------------------------------------------------------


def _attach(model: Any, folder: Path, own: str, name: str, labels: Sequence[str], *, whole: bool = True) -> Any:
    """Put an adapter into a transformers model, or into peft's around one. whole: it may bring matrices of its own."""
    peft = _peft()
    config = _read_config(peft, folder)
    _check_name(config, folder, name, labels)
    if config.bias != "none" and not whole:
        raise ModelError(f"adapter {folder} changes biases of {name}; such a one can only be merged (adapter=)")
    try:
        if isinstance(model, peft.PeftModel):
            wrapped = model
            wrapped.add_adapter(own, config)
        else:
            wrapped = peft.PeftModel(model, config, own)
        weights = _changes(peft.utils.load_peft_weights(str(folder), device="cpu"))
    except Exception as error:  # peft, safetensors and torch raise a dozen unrelated kinds
        raise ModelError(f"adapter {folder} cannot be put into {name}: {_first_line(error)}") from error
    if not whole and (odd := [key for key in weights if "lora_" not in key]):
        raise ModelError(
            f"adapter {folder} brings whole matrices of its own ({odd[0]}), so it cannot be kept beside the weights of "
            f"{name}; merge it (adapter=)"
        )
    there = _changes(peft.get_peft_model_state_dict(wrapped, adapter_name=own, save_embedding_layers=False))
    _check_shapes(there, weights, folder, name)
    report = peft.utils.set_peft_model_state_dict(wrapped, weights, own)
    if report.unexpected_keys:
        raise ModelError(
            _other_base(folder, name, f"it has weights for {report.unexpected_keys[0]}, which is not there")
        )
    return wrapped


def _changes(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Without the copies that peft makes of the base's own matrices where an adapter changes an embedding."""
    return {key: weight for key, weight in weights.items() if ".base_layer." not in key}


def _check_shapes(there: Mapping[str, Any], weights: Mapping[str, Any], folder: Path, name: str) -> None:
    there, weights = ({key.removeprefix(_INSIDE): own for key, own in every.items()} for every in (there, weights))
    for key, weight in weights.items():
        if key in there and there[key].shape != weight.shape:
            shapes = f"{list(weight.shape)}, where {list(there[key].shape)} is wanted"
            raise ModelError(_other_base(folder, name, f"its {key} is {shapes}"))
        if not bool(weight.isfinite().all()):
            raise ModelError(f"adapter {folder} is damaged: {key} holds a NaN or an infinity")
    if missing := sorted(there.keys() - weights.keys()):
        raise ModelError(_other_base(folder, name, f"it has no {missing[0]}"))
    if odd := sorted(weights.keys() - there.keys()):
        raise ModelError(_other_base(folder, name, f"it has weights for {odd[0]}, which is not there"))


def _other_base(folder: Path, name: str, reason: str) -> str:
    return f"adapter {folder} is not for {name}: {reason}; choose an adapter that was trained on this model"


def _check_name(config: Any, folder: Path, name: str, labels: Sequence[str]) -> None:
    base = str(config.base_model_name_or_path or "")
    if not base or not labels or _plain(base) in {_plain(label) for label in labels}:
        return
    raise ModelError(
        f"adapter {folder} was trained for {base!r}, and the target is {name!r}; if that is the same model under "
        f"another name, set base_model_name_or_path in its {_CONFIG} to {Path(labels[0]).name!r}"
    )


def _plain(label: str) -> str:
    """The last part of a hub id or path, in which case, ends and the hub's folders of snapshots make no difference."""
    parts = Path(label.rstrip("/")).parts
    for part in parts:
        if part.startswith("models--"):
            return part.rpartition("--")[2].casefold()
    return (parts[-1] if parts else "").casefold().removesuffix(".gguf")


def _read_config(peft: Any, folder: Path) -> Any:
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
    except Exception as error:
        raise ModelError(f"{folder / _CONFIG} cannot be read: {_first_line(error)}") from error
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind not in _KINDS:
        raise ModelError(f"adapter {folder} is of type {kind}; these are supported: {', '.join(_KINDS)}")
    config.inference_mode = True
    return config


def _untie(wrapped: Any) -> None:
    """Give what an adapter changes a weight of its own, where a head and an embedding are one: peft would add the
    change to both."""
    owners: dict[int, set[int]] = {}
    for module in wrapped.modules():
        if (weight := module._parameters.get("weight")) is not None:
            owners.setdefault(id(weight), set()).add(id(module))
    for module in list(wrapped.modules()):
        if hasattr(module, "lora_A"):
            base = module.get_base_layer()
            if len(owners.get(id(base._parameters.get("weight")), ())) > 1:
                base.weight = torch.nn.Parameter(base.weight.detach().clone(), requires_grad=False)


def _peft() -> Any:
    if importlib.util.find_spec("peft") is None:
        raise OptionError("adapters need peft, which is not installed: pip install 'pilotfish[adapters]'")
    import peft

    return peft


@contextmanager
def _quiet() -> Iterator[None]:
    """peft warns of what is checked here, and of its own use of transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__

"""What a model is, what it costs in memory, and what can draft for it, with the reason where something cannot.

It does not know any drafter: it tries to build each one, and the refusal is the reason.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import click

from .drafters import registry
from .drafters.base import Setting
from .engine.memory import bytes_per_token, size_pool
from .engine.options import EngineOptions
from .errors import UserError
from .models.load import Loaded, LoadOptions, load
from .models.quantized import QuantizedDecoder


@dataclass(frozen=True, slots=True)
class Facts:
    """Sizes in bytes. weights: their format. bitwise: whether a row's logits are the same in any batch. drafters: per
    method None if it works, else why not. converted: what became of a GGUF file's types, if it is used as it is; else
    empty. described: what those that work say of themselves, if anything."""

    name: str
    architecture: str
    weights: str
    device: str
    implementation: str
    bitwise: bool
    num_layers: int
    hidden_size: int
    vocab_size: int
    context: int
    weights_bytes: int
    kv_bytes_per_token: int
    kv_bytes_full_context: int
    kv_pool_bytes: int
    chat_template: bool
    converted: str
    drafters: Mapping[str, str | None]
    described: Mapping[str, str]

    def show(self) -> None:
        """Print for people."""
        rows = [
            ("model", f"{self.name} ({self.architecture}, {self.weights}, {self.device})"),
            ("shape", f"{self.num_layers} layers, hidden size {self.hidden_size}, vocabulary {self.vocab_size}"),
            ("decoder", self.implementation),
            ("rows", "bit for bit the same in any batch" if self.bitwise else "may round differently in another batch"),
            ("context", f"{self.context} tokens"),
            ("chat template", "yes" if self.chat_template else "no"),
            ("weights", _size(self.weights_bytes)),
            *([("from the file", self.converted)] if self.converted else []),
            ("keys and values", f"{_size(self.kv_bytes_per_token)} a token, {_size(self.kv_bytes_full_context)} at "
                                f"full context; the pool may grow to {_size(self.kv_pool_bytes)}"),
        ]  # fmt: skip
        for name, value in rows:
            click.echo(f"{name:17}{value}")
        click.echo("what can draft for it:")
        for method, reason in self.drafters.items():
            about = self.described.get(method, "") if reason is None else reason
            click.echo(f"  {'yes' if reason is None else 'no ':4} {method:13}{about}".rstrip())


def inspect(model: str, load_options: LoadOptions, engine: EngineOptions, config: Mapping[str, Any]) -> Facts:
    """Load a model and look at it. Raises ModelError if it cannot work here at all."""
    loaded = load(model, **asdict(load_options))
    info = loaded.model.info
    length = min(engine.max_model_len or info.context, info.context)
    per_token = bytes_per_token(info)
    found = {method: attempt(method, loaded, engine, length, config) for method in registry.methods()}
    return Facts(
        name=info.name,
        architecture=info.architecture,
        weights=info.quantization if info.quantization != "none" else str(info.dtype).removeprefix("torch."),
        implementation=info.implementation,
        bitwise=info.bitwise,
        device=str(info.device),
        num_layers=len(info.layers),
        hidden_size=info.hidden_size,
        vocab_size=info.vocab_size,
        context=info.context,
        weights_bytes=info.num_bytes,
        kv_bytes_per_token=per_token,
        kv_bytes_full_context=per_token * length,
        kv_pool_bytes=per_token * size_pool(info, engine, length) * engine.block_size,
        converted=loaded.model.quantised.remark if isinstance(loaded.model, QuantizedDecoder) else "",
        chat_template=bool(loaded.tokenizer and loaded.tokenizer.hf.chat_template),
        drafters={method: reason for method, (reason, _) in found.items()},
        described={method: about for method, (_, about) in found.items() if about},
    )


def obstacle(method: str, loaded: Loaded, engine: EngineOptions, length: int, config: Mapping[str, Any]) -> str | None:
    """Why this method cannot draft for this model, or None."""
    return attempt(method, loaded, engine, length, config)[0]


def attempt(
    method: str, loaded: Loaded, engine: EngineOptions, length: int, config: Mapping[str, Any]
) -> tuple[str | None, str]:
    """Why this method cannot draft for this model, or None; and if it can, what it says of itself."""
    setting = Setting(
        target=loaded.model.info,
        model=loaded.model,
        cache=loaded.model.new_cache(1, engine.block_size),
        tokenizer=loaded.tokenizer,
        max_length=length,
        max_num_seqs=1,
        page_size=engine.block_size,
        max_rows=engine.max_num_batched_tokens,
        num_cache_tokens=engine.block_size,
        device=loaded.model.info.device,
    )
    try:
        drafter = registry.parse({**registry.known_to(method, config), "method": method}).build(setting)
    except UserError as error:
        return str(error), ""
    return None, drafter.describe()


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError

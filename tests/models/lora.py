"""LoRA adapters for tests: random weights in peft's format, written by peft itself."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


@contextmanager
def calm() -> Iterator[None]:
    """peft uses names that transformers has deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def adapted(model: Any, *, seed: int = 1, size: float = 0.3, **overrides: Any) -> Any:
    """peft's model around a transformers model, which is changed in place. overrides: fields of its config."""
    from peft import LoraConfig, PeftModel

    fields = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]} | overrides
    with calm():
        wrapped = PeftModel(model, LoraConfig(**fields))
    generator = torch.Generator().manual_seed(seed)
    for name, weight in wrapped.named_parameters():
        if "lora_" in name:
            weight.data.normal_(0, size, generator=generator)
    return wrapped.eval()


def write_adapter(model: Any, folder: Path, base: str | None = None, **options: Any) -> Path:
    """An adapter for this model, which is changed in place, in a folder. base: what it says that it is for."""
    wrapped = adapted(model, **options)
    if base is not None:
        wrapped.peft_config["default"].base_model_name_or_path = base
    with calm():
        wrapped.save_pretrained(folder, save_embedding_layers=False)
    return folder

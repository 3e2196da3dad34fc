"""What all engines are given: model folders, prompts as token ids, what ends a text.

It does not know engines. The one trick: the chat prompt becomes ids once, here, so that every engine reads the same.
"""

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from ...errors import ModelError, OptionError, PromptError
from ...models.demo import GGUF, PACKAGE, demo_folder
from ...models.disk_cache import cache_folder
from ...models.load import DEMO
from ...models.tokenizer import Tokenizer
from ..plot import check
from ..prompts import BenchPrompt, read_prompts
from .options import PeersOptions


@dataclass(frozen=True, slots=True)
class Task:
    """ids: per prompt. stop_ids: what ends a text. num_weights: of the target and the draft. gguf: None if there is
    none. home: where environments and converted models lie."""

    options: PeersOptions
    home: Path
    model: Path
    draft_model: Path | None
    gguf: Path | None
    prompts: Sequence[BenchPrompt]
    ids: Sequence[Sequence[int]]
    stop_ids: tuple[int, ...]
    num_weights: tuple[int, int] = (0, 0)

    @property
    def context(self) -> int:
        """Room for the longest prompt, its text, and a draft that reaches beyond it."""
        longest = max(map(len, self.ids)) + self.options.max_tokens + 64
        return -(-longest // 256) * 256

    def header(self) -> dict[str, Any]:
        """What two runs must share for their results to belong into one table."""
        digest = hashlib.sha256(json.dumps([[*map(list, self.ids)], self.stop_ids]).encode()).hexdigest()
        return {
            "model": str(self.model),
            "draft_model": None if self.draft_model is None else str(self.draft_model),
            "max_tokens": self.options.max_tokens,
            "threads": self.options.num_threads,
            "pilotfish": {name: dict(config) for name, config in self.options.configs.items()},
            "prompts": f"{len(self.ids)} prompts, {digest[:12]}",
        }

    def cache(self, model: Path) -> Path:
        """The folder for what is converted from this model; another file of weights gets another folder."""
        files = sorted(path for path in model.iterdir() if path.suffix in (".safetensors", ".json"))
        state = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        digest = hashlib.sha256(repr((str(model), state)).encode()).hexdigest()
        return self.home / "models" / f"{model.name}-{digest[:8]}"


def prepare_task(options: PeersOptions) -> Task:
    """Find the models and read the prompts. Raises UserErrors for what can be mended, before anything is run."""
    if options.plot is not None:
        check(options.plot)
    model = _folder(options.model)
    draft = None if options.draft_model is None else _folder(options.draft_model)
    prompts = read_prompts(options.prompts, options.limit)
    tokenizer, config = _tokenizer(model), _json(model / "config.json")
    ids = [prompt.ids(tokenizer) for prompt in prompts]
    context = config.get("max_position_embeddings")
    for prompt, own in zip(prompts, ids, strict=True):
        if context is not None and len(own) + options.max_tokens > context:
            raise PromptError(
                f"{prompt.name} has {len(own)} tokens, which with max_tokens {options.max_tokens} is more than the "
                f"context of {context}; leave it out, shorten it, or lower max_tokens"
            )
    home = Path(options.environments or cache_folder() / "peers").expanduser().absolute()
    weights = (num_weights(model), 0 if draft is None else num_weights(draft))
    return Task(options, home, model, draft, _gguf(options, model), prompts, ids, stop_ids(model), weights)


def num_weights(model: Path) -> int:
    """Weights in a folder's safetensors files, read from their headers."""
    total = 0
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        total += sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total


def stop_ids(model: Path) -> tuple[int, ...]:
    """What ends a text by the model's generation config, else by its config."""
    for name in ("generation_config.json", "config.json"):
        path = model / name
        found = _json(path).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    return ()


def _folder(name: str) -> Path:
    if name == DEMO:
        return demo_folder()
    path = Path(name).expanduser()
    if path.exists() or path.is_absolute() or name.startswith((".", "~")):
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} is not a model folder: it has no config.json")
        return path.absolute()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name))
    except Exception as error:  # the hub raises a dozen unrelated kinds
        raise ModelError(f"model {name!r} is neither a folder nor found on the hub: {error}") from error


def _gguf(options: PeersOptions, model: Path) -> Path | None:
    """The file for llama.cpp: the one named, the demo model's own, or the only one in the model's folder."""
    if options.gguf is not None:
        path = Path(options.gguf).expanduser().absolute()
        if not path.is_file():
            raise OptionError(f"gguf: there is no file {path}")
        return path
    if options.model == DEMO:
        spec = find_spec(PACKAGE)
        assert spec is not None
        assert spec.submodule_search_locations is not None, "demo_folder has looked"
        return Path(spec.submodule_search_locations[0]) / GGUF
    found = sorted(model.glob("*.gguf"))
    return found[0] if len(found) == 1 else None


def _tokenizer(model: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        return Tokenizer(AutoTokenizer.from_pretrained(model))
    except Exception as error:  # transformers raises a dozen unrelated kinds
        raise ModelError(f"the tokenizer in {model} cannot be loaded: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value

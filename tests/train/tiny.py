"""Texts, lessons and folders for the tests of training: tiny models, a byte tokenizer, nothing downloaded."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pilotfish.models.decoder import Decoder
from pilotfish.models.load import Loaded
from pilotfish.train.options import Eagle3Options
from pilotfish.train.store import Text
from tests.models.tiny import tiny_model

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


def target(**overrides: Any) -> Loaded:
    """A tiny target of bare ids. overrides: fields of its config."""
    return Loaded(Decoder(tiny_model("llama", dtype=torch.float32, **overrides)), None)


def folder_model(folder: Path) -> str:
    """A tiny model folder with a byte tokenizer that knows a chat format."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE).save_pretrained(folder)
    tiny_model("llama", vocab_size=256, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def options(out: Path | str = "nowhere", **values: Any) -> Eagle3Options:
    own: dict[str, Any] = {
        "out": str(out),
        "num_tokens": 600,
        "max_length": 64,
        "collect_batch": 8,
        "holdout": 0.1,
        "batch_tokens": 128,
        "draft_vocab_size": 48,
        "precision": "float32",
        "bench_limit": 0,
    }
    return Eagle3Options(**own | values)


def texts(count: int, *, vocab_size: int = 64, seed: int = 0) -> list[Text]:
    """Random texts, 6 to 30 tokens, prompts 1 to 6."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    found = []
    for i in range(count):
        ids = torch.randint(vocab_size, (number(9, 30),), generator=generator).tolist()
        found.append(Text(tuple(ids), num_prompt=number(1, 6), kind="random", number=i))
    return found

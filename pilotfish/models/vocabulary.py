"""A draft model that proposes frequent tokens only: the list of them, and its head cut down to their rows.

FR-Spec (Zhao et al. 2025, arXiv 2502.14856). Of a small model with a large vocabulary the head is a quarter of the
weights, and a pass reads them all; what is rarely said need not be proposed. It does not know drafters. The one trick:
a token that is not on the list has q = 0, which every acceptance rule is exact for, so a poor list costs acceptance
and never changes the text.

A list counts the tokens of the target's own text and of what it was asked (`bench.vocabulary` says how). Behind those
come all others in the order of their ids: byte-pair ids are numbered by merge, the pairs found most often first. The
file keeps the counts alone, and a fingerprint of the tokenizer they are for:

    {"pilotfish": "draft vocabulary", "tokenizer": "3f..", "model": "..", "ids": [198, 13, ...], "counts": [410.2, ...]}
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DraftError, OptionError
from .base import ModelOutput

if TYPE_CHECKING:
    from torch import Tensor

    from ..paged.batch import Batch
    from ..paged.cache import KVCache
    from .base import CausalLM, ModelInfo
    from .tokenizer import Tokenizer

KIND = "draft vocabulary"
_MOST_EXPECTED = 1 << 16  # what is rarer than that is as good as never expected


@dataclass(frozen=True, slots=True)
class Frequencies:
    """Tokens seen, most frequent first (ties: by id), each with its count. tokenizer: see `fingerprint`."""

    tokenizer: str
    model: str
    ids: tuple[int, ...]
    counts: tuple[float, ...]

    def write(self, path: Path) -> None:
        """Raises OptionError if the file cannot be written."""
        fields = {"pilotfish": KIND, "tokenizer": self.tokenizer, "model": self.model}
        document = json.dumps({**fields, "ids": self.ids, "counts": self.counts})
        try:
            path.write_text(document + "\n", encoding="utf-8")
        except OSError as error:
            raise OptionError(f"{path} cannot be written: {error.strerror}") from error


def read(path: Path) -> Frequencies:
    """Raises OptionError, naming the file, if it is not such a list."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"draft_vocabulary {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise OptionError(f"draft_vocabulary {path} is not JSON: {error}") from error
    kind = fields.get("pilotfish") if isinstance(fields, dict) else None
    wanted = ("tokenizer", "model", "ids", "counts")
    if kind != KIND or any(name not in fields for name in wanted):
        raise OptionError(f"draft_vocabulary {path} is no list of tokens; `pilotfish tune --draft-model ..` makes one")
    ids, counts = fields["ids"], fields["counts"]
    lists = isinstance(ids, list) and isinstance(counts, list) and len(ids) == len(counts) == len(set(map(str, ids)))
    fine = lists and all(type(token) is int and token >= 0 for token in ids)
    if not fine or any(type(number) not in (int, float) or not number >= 0 for number in counts):
        raise OptionError(f"draft_vocabulary {path}: ids and counts must be two lists of numbers, equally long")
    return Frequencies(str(fields["tokenizer"]), str(fields["model"]), tuple(ids), tuple(counts))


def count(
    texts: Iterable[Sequence[int]],
    tokenizer: Tokenizer | None,
    info: ModelInfo,
    *,
    expected: Tensor | None = None,
) -> Frequencies:
    """The frequencies of these tokens. What ends a text is always among them: it is said once in each.

    expected: [V], added to the counts, for tokens that might have stood there.
    """
    counter: dict[int, float] = dict(Counter([*info.eos_ids, *(token for text in texts for token in text)]))
    if expected is not None:
        for token in expected.argsort(descending=True)[:_MOST_EXPECTED].tolist():
            counter[token] = round(counter.get(token, 0) + float(expected[token]), 6)
    order = sorted((token for token in counter if counter[token] > 0), key=lambda token: (-counter[token], token))
    return Frequencies(fingerprint(tokenizer, info), info.name, tuple(order), tuple(counter[token] for token in order))


def fingerprint(tokenizer: Tokenizer | None, info: ModelInfo) -> str:
    """The same for the same tokens under the same ids, however far a model's table is padded."""
    names = sorted(tokenizer.vocabulary.items(), key=lambda item: item[1]) if tokenizer else info.vocab_size
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


def choose(frequencies: Frequencies | None, size: int, num_ids: int, always: Iterable[int] = ()) -> tuple[int, ...]:
    """The ``size`` ids under ``num_ids`` that are worth a row, ascending; all if there are no more.

    ``always``, then what was counted, then the ids in their own order.
    """
    wanted = dict.fromkeys(always)
    wanted |= dict.fromkeys(() if frequencies is None else frequencies.ids)
    wanted |= dict.fromkeys(range(min(num_ids, size)))
    return tuple(sorted([token for token in wanted if token < num_ids][:size]))


def check(frequencies: Frequencies, path: Path, tokenizer: Tokenizer | None, info: ModelInfo) -> None:
    """Raises DraftError for a list that was made with another tokenizer than the target's."""
    if frequencies.tokenizer != fingerprint(tokenizer, info):
        raise DraftError(
            f"draft_vocabulary {path} was made for {frequencies.model}, whose tokens are not those of {info.name}; "
            "make one for this model with `pilotfish tune`"
        )


def with_head(model: CausalLM, ids: Sequence[int]) -> CausalLM:
    """The same model, weights shared, with logits of these ids alone: [N, len(ids)], in their order.

    A model that has a ``with_head`` of its own leaves out the other rows' work; of others they are thrown away.
    """
    own: Any = getattr(model, "with_head", None)
    reduced: CausalLM = DroppedLogits(model, ids) if own is None else own(ids)
    return reduced


class DroppedLogits:
    """A model most of whose logits are thrown away."""

    def __init__(self, model: CausalLM, ids: Sequence[int]):
        self.model, self.ids, self.info = model, list(ids), model.info

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def new_cache(self, num_pages: int, page_size: int = 16) -> KVCache:
        return self.model.new_cache(num_pages, page_size)

    def forward(
        self, batch: Batch, cache: KVCache, *, taps: Sequence[int] = (), layers: Sequence[int] | None = None
    ) -> ModelOutput:
        output = self.model.forward(batch, cache, taps=taps, layers=layers)
        return ModelOutput(output.logits_NV[:, self.ids], output.taps)


def with_part(module: Any, part: Any, other: Any) -> Any:
    """A shallow copy of a torch module in which a direct child is another; None if ``part`` is no direct child."""
    names = [name for name, child in module.named_children() if child is part]
    if not names:
        return None
    twin = copy.copy(module)
    twin._modules = {**module._modules, names[0]: other}
    return twin

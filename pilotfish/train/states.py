"""Lessons: what the target computed of a text, from which a head learns; made when wanted, or read back from disk.

It does not know heads. The one trick: a whole text is one feed behind an empty cache, so the target runs exactly as it
does when it serves, many texts to a pass; and what is kept is rounded once, so a lesson is the same whether it was just
computed or lay on disk, and a run that was interrupted goes on as if it had not been.

    row r of a text        the target's states there, of all but the last two tokens
    law j                  what the target says behind answer token j (row num_prompt + j), of all but the last
"""

import math
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..models.base import CausalLM
from ..paged.batch import Feed, lay_out
from .store import Text

NUM_LIKELIEST = 48  # tokens of a law that are kept; of a small model's they hold some 95 %
_ROWS = 768  # of a pass: their logits are all in memory at once
_PAGE = 16
_LARGEST = 65504.0  # of float16


@dataclass(frozen=True, slots=True)
class Lesson:
    """text: without the ids, nothing of it is repeated here. states_MD: float16 [rows, states side by side].
    ids_NK, probs_NK: per law the draft ids of its likeliest tokens, and what the target gives them (float16; the rest
    of its mass is elsewhere). best_N: its likeliest token as a draft id; -1 if the head cannot say that one."""

    text: Text
    states_MD: Tensor
    ids_NK: Tensor
    probs_NK: Tensor
    best_N: Tensor


class Teacher:
    """layers: whose output states are taken. finish: what is done to them, such as the last norm. draft_ids: the
    target's ids that the head can say. cache_bytes: how much of the disk ``folder`` is on may be used."""

    def __init__(
        self,
        model: CausalLM,
        layers: Sequence[int],
        draft_ids: Sequence[int],
        *,
        finish: Callable[[Tensor], Tensor] = lambda states_TD: states_TD,
        folder: Path | None = None,
        cache_bytes: int = 0,
    ):
        self.model, self.layers, self.finish = model, tuple(layers), finish
        self.device = model.info.device
        self.draft_ids_N = torch.tensor(draft_ids, device=self.device)
        self.draft_of_V = torch.full((model.info.vocab_size,), -1, dtype=torch.int64, device=self.device)
        self.draft_of_V[self.draft_ids_N] = torch.arange(len(draft_ids), device=self.device)
        self.num_kept = min(NUM_LIKELIEST, len(draft_ids))
        self.cache: _Cache | None = None
        if folder is not None and cache_bytes > 0:
            self.cache = _Cache(folder, cache_bytes)

    def lessons(self, texts: Sequence[Text]) -> list[Lesson]:
        """One per text, in order. A text has at least two answer tokens."""
        found = [None if self.cache is None else self.cache.read(text) for text in texts]
        missing = [text for text, lesson in zip(texts, found, strict=True) if lesson is None]
        made = iter(self._make(missing))
        lessons = []
        for lesson in found:
            if lesson is None:
                lesson = next(made)
                if self.cache is not None:
                    self.cache.write(lesson)
            lessons.append(lesson)
        return lessons

    def _make(self, texts: Sequence[Text]) -> list[Lesson]:
        lessons: list[Lesson] = []
        part: list[Text] = []
        for text in texts:
            if part and sum(len(one.ids) for one in part) + len(text.ids) > _ROWS:
                lessons += self._run(part)
                part = []
            part.append(text)
        return lessons + (self._run(part) if part else [])

    @torch.inference_mode()
    def _run(self, texts: Sequence[Text]) -> list[Lesson]:
        """One pass. The last token of a text is only ever guessed."""
        lengths = [len(text.ids) - 1 for text in texts]
        pages = sum(-(-length // _PAGE) for length in lengths)
        cache = self.model.new_cache(pages, _PAGE)
        cache.prefix_sharing = False
        feeds = []
        for i, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            assert length > text.num_prompt, "two answer tokens"
            cache.open(str(i), text.ids[:length])
            cache.reserve(str(i), length)
            feeds.append(Feed(str(i), text.ids[:length], 0, length - text.num_prompt))
        batch = lay_out(feeds, cache, self.device)
        output = self.model.forward(batch, cache, taps=sorted(set(self.layers)))
        states_TD = torch.cat([self.finish(output.taps[layer]) for layer in self.layers], dim=1)
        states_TD = states_TD.clamp(-_LARGEST, _LARGEST).half().cpu()
        laws = self._laws(output.logits_NV)
        counts = [length - text.num_prompt for text, length in zip(texts, lengths, strict=True)]
        parts = [torch.split(part, counts) for part in laws]
        states = torch.split(states_TD, lengths)
        return [
            Lesson(text, own[:-1].clone(), *(part[i].clone() for part in parts))
            for i, (text, own) in enumerate(zip(texts, states, strict=True))
        ]

    def _laws(self, logits_NV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draft ids, probabilities and the best one, of each row."""
        logits_NV = logits_NV.float()
        total_N1 = logits_NV.logsumexp(1, keepdim=True)
        values_NK, ids_NK = logits_NV.index_select(1, self.draft_ids_N).topk(self.num_kept, dim=1)
        probs_NK = (values_NK - total_N1).exp()
        best_N = self.draft_of_V[logits_NV.argmax(1)]
        return ids_NK.int().cpu(), probs_NK.half().cpu(), best_N.int().cpu()


class _Cache:
    """Lessons in a file without a name, which the system takes away with the process, however that ends."""

    def __init__(self, folder: Path, num_bytes: int):
        self._file, name = tempfile.mkstemp(dir=folder, prefix=".states-")
        os.unlink(name)
        weakref.finalize(self, os.close, self._file)
        self._left, self._end = num_bytes, 0
        self._places: dict[tuple[int, ...], tuple[int, list[tuple[int, ...]]]] = {}

    def read(self, text: Text) -> Lesson | None:
        place = self._places.get(text.ids)
        if place is None:
            return None
        offset, shapes = place
        parts = []
        for shape, dtype in zip(shapes, _TYPES, strict=True):
            length = math.prod(shape) * np.dtype(dtype).itemsize
            data = os.pread(self._file, length, offset)
            assert len(data) == length, "what was written is there"
            parts.append(torch.from_numpy(np.frombuffer(data, dtype).reshape(shape).copy()))
            offset += length
        return Lesson(text, *parts)

    def write(self, lesson: Lesson) -> None:
        """Keep it, if there is room. A full disk only means that no more is kept."""
        arrays = [part.numpy() for part in (lesson.states_MD, lesson.ids_NK, lesson.probs_NK, lesson.best_N)]
        data = b"".join(array.tobytes() for array in arrays)
        if len(data) > self._left:
            return
        try:
            written = os.pwrite(self._file, data, self._end)
        except OSError:
            written = 0
        if written < len(data):
            self._left = 0
            return
        self._places[lesson.text.ids] = (self._end, [array.shape for array in arrays])
        self._end += len(data)
        self._left -= len(data)


_TYPES = ("float16", "int32", "float16", "int32")

"""The encoder-decoder pair of the report: two T5 models that write how words are spoken, trained here on one core.

It does not know drafting. The one trick: a step is a function of the weights and its own number, so a training that
was ended goes on from its checkpoint as if it had not been. The target learns from the dictionary; the draft learns the
target's laws at the same places, for what counts of a draft is that its law is near the target's, not that it is right.

    target   10.0 M parameters: 4 layers that read, 8 that write, width 256
    draft     0.6 M             2                  1              128
"""

import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..decoding.sampling import SamplingParams
from ..errors import OptionError
from ..llm import LLM
from ..models.load import Loaded, from_objects
from .spoken import END, NUM_IDS, PAD, Dictionary, Lines, num_errors, sounds_of, words_of

Role = Literal["target", "draft"]
_SIZES: dict[Role, dict[str, int]] = {
    "target": {"d_model": 256, "d_kv": 32, "num_heads": 8, "d_ff": 768, "num_layers": 4, "num_decoder_layers": 8},
    "draft": {"d_model": 128, "d_kv": 32, "num_heads": 4, "d_ff": 384, "num_layers": 2, "num_decoder_layers": 1},
}
_SAVE_SECONDS = 60.0
_SINGLE, _LONGEST = 0.2, 0.4  # of the steps: up to there single words, and from there texts of all lengths
_TEST_LINES, _TEST_WORDS = 64, 4


@dataclass(frozen=True, slots=True)
class Schedule:
    """num_steps: of training. num_words: in all texts of a step. most_words: in one text. rate: the highest."""

    num_steps: int
    num_words: int
    most_words: int = 8
    rate: float = 1e-3
    warmup: int = 100


SCHEDULES: dict[Role, Schedule] = {
    "target": Schedule(num_steps=1600, num_words=64),
    "draft": Schedule(num_steps=1000, num_words=64, rate=1.5e-3),
}


def new_model(role: Role, sizes: dict[str, int] | None = None) -> Any:
    """An untrained T5 (the original architecture), the same each time."""
    from transformers import T5Config, T5ForConditionalGeneration

    more: dict[str, Any] = {"tie_word_embeddings": True, "decoder_start_token_id": PAD}
    more |= sizes or _SIZES[role]
    config = T5Config(
        vocab_size=NUM_IDS,
        feed_forward_proj="relu",
        dropout_rate=0.0,  # every text is new: nothing is learnt by heart
        pad_token_id=PAD,
        eos_token_id=END,
        **more,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return T5ForConditionalGeneration(config)


class Lesson:
    """One model's training. teacher: whose laws are learnt; None: what the dictionary says.

    folder: holds the checkpoint, and in the end the model. Raises OptionError if its checkpoint is of another training.
    """

    def __init__(
        self, role: Role, model: Any, words: Dictionary, folder: Path, schedule: Schedule, teacher: Any = None
    ):
        self.role, self.model, self.words, self.folder = role, model, words, folder
        self.schedule, self.teacher = schedule, teacher
        self.optimizer = torch.optim.AdamW(_groups(model), lr=schedule.rate, betas=(0.9, 0.98), weight_decay=0.01)
        self.step, self.seconds, self.loss = 0, 0.0, float("nan")
        self.path = folder / "checkpoint.pt"
        self.notes: dict[str, Any] = {}
        self._restore()

    def run(self, watch: Callable[["Lesson"], None] = lambda _lesson: None, stop_at: int | None = None) -> None:
        """Train to the end, or up to a step, and save; Ctrl-C saves too."""
        last = self.schedule.num_steps if stop_at is None else min(stop_at, self.schedule.num_steps)
        saved = time.monotonic()
        self.model.train()
        try:
            while self.step < last:
                self._learn()
                watch(self)
                if time.monotonic() - saved > _SAVE_SECONDS:
                    self.save()
                    saved = time.monotonic()
        finally:
            self.model.train(False)
            self.save()
        if self.step == self.schedule.num_steps:
            self._finish()

    def save(self) -> None:
        """The checkpoint, written beside its place and moved there whole."""
        state = {
            "schedule": repr(self.schedule),
            "step": self.step,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(f".{os.getpid()}")
        torch.save(state, partial)
        partial.replace(self.path)

    def _restore(self) -> None:
        if not self.path.is_file():
            return
        state = torch.load(self.path, weights_only=True)
        if state["schedule"] != repr(self.schedule):
            raise OptionError(f"{self.path} is of another training; remove it, or name another folder")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]

    def _learn(self) -> None:
        began = time.process_time()
        schedule = self.schedule
        for group in self.optimizer.param_groups:
            group["lr"] = group["times"] * schedule.rate * _rate(self.step, schedule)
        num_words = random.Random(self.step).randint(1, self._most_words())
        lines = self.words.lines(self.step, max(1, schedule.num_words // num_words), num_words)
        loss = self._loss(lines)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        value = float(loss.detach())
        self.loss = value if math.isnan(self.loss) else 0.98 * self.loss + 0.02 * value
        self.seconds += time.process_time() - began

    def _most_words(self) -> int:
        """Single words first: which letter a sound belongs to is found out there, and lasts for longer texts."""
        grown = (self.step / self.schedule.num_steps - _SINGLE) / (_LONGEST - _SINGLE)
        return 1 + int((self.schedule.most_words - 1) * min(1.0, max(0.0, grown)))

    def _loss(self, lines: Lines) -> Tensor:
        sources, mask = _padded(lines.sources)
        labels, known = _padded(lines.targets)
        inputs = {"input_ids": sources, "attention_mask": mask, "decoder_input_ids": _shifted(labels)}
        logits_NV = self.model(**inputs).logits[known.bool()]
        if self.teacher is None:
            return F.cross_entropy(logits_NV, labels[known.bool()])
        with torch.inference_mode():
            p_NV = torch.softmax(self.teacher(**inputs).logits[known.bool()], 1)
        return F.cross_entropy(logits_NV, p_NV.clone())

    def _finish(self) -> None:
        self.notes = {
            "steps": self.step,
            "cpu_minutes": round(self.seconds / 60, 1),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            **error_rates(self.model, self.words),
        }
        with _quiet():
            self.model.save_pretrained(self.folder)
        (self.folder / "notes.json").write_text(json.dumps(self.notes, indent=1) + "\n", encoding="utf-8")
        self.path.unlink()


def error_rates(model: Any, words: Dictionary) -> dict[str, float]:
    """On held-out words, greedy: wrong sounds by sounds, and wrong words by words (any way to speak one is right)."""
    lines = words.tests(_TEST_LINES, _TEST_WORDS)
    llm = LLM.from_model(from_objects(model))
    params = SamplingParams(temperature=0, max_tokens=20 * _TEST_WORDS)
    texts = [done.token_ids for done in llm.generate(lines.sources, params)]
    wrong = total = wrong_words = num_words = 0
    for source, text in zip(lines.sources, texts, strict=True):
        said = sounds_of(text)
        for i, word in enumerate(words_of(source)):
            errors, length = num_errors(said[i] if i < len(said) else [], words.ways[word])
            wrong, total = wrong + errors, total + length
            wrong_words, num_words = wrong_words + (errors > 0), num_words + 1
    return {"wrong_sounds": round(wrong / total, 4), "wrong_words": round(wrong_words / num_words, 4)}


def trained(
    folder: Path, watch: Callable[[Lesson], None], words: Callable[[], Dictionary]
) -> tuple[dict[Role, Loaded], dict[Role, dict[str, Any]]]:
    """The pair, trained if it is not there yet, and what is known of each training."""
    loaded: dict[Role, Loaded] = {}
    notes: dict[Role, dict[str, Any]] = {}
    teacher: Any = None
    for role in ("target", "draft"):
        place = folder / role
        if not (place / "notes.json").is_file():
            Lesson(role, new_model(role), words(), place, SCHEDULES[role], teacher).run(watch)
        teacher = load_model(place)
        notes[role] = json.loads((place / "notes.json").read_text(encoding="utf-8"))
        loaded[role] = from_objects(teacher, None, f"spoken words, {role}")
    return loaded, notes


def load_model(folder: Path) -> Any:
    """What a training left."""
    from transformers import T5ForConditionalGeneration

    with _quiet():
        return T5ForConditionalGeneration.from_pretrained(folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own bars."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _groups(model: Any) -> list[dict[str, Any]]:
    """Parameters by how fast they learn. Biases by distance are logits themselves: at the rate of all others they would
    take thousands of steps to say "the letter before", and embeddings of this size would hardly move."""
    named = list(model.named_parameters())
    biases = [p for name, p in named if "relative_attention_bias" in name]
    embeddings = [p for name, p in named if name == "shared.weight"]
    others = [p for name, p in named if "relative_attention_bias" not in name and name != "shared.weight"]
    return [{"params": params, "times": times} for params, times in ((others, 1), (embeddings, 5), (biases, 30))]


def _rate(step: int, schedule: Schedule) -> float:
    """Up in a line, down along a cosine to a twentieth."""
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    done = (step - schedule.warmup) / max(1, schedule.num_steps - schedule.warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))


def _padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Ids and which of them are no padding, both int64 [rows, longest]."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return ids, mask


def _shifted(labels: Tensor) -> Tensor:
    """What a decoder has read when it writes these: the start token, then all but the last."""
    return F.pad(labels[:, :-1], (1, 0), value=PAD)

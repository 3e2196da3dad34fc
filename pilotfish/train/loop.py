"""Trainer: packs in, a better head out; a checkpoint every minute.

It does not know what kind of head it is (`eagle3` and `medusa` do) or where texts come from. The one trick: a step is a
function of the weights and its own number. The order of texts, the rate and the unrolling follow from the number, so a
run that was killed goes on bit for bit as if it had not been.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from . import checkpoint
from .curves import Curves
from .lessons import Pack, pack, plan
from .losses import Tally
from .options import Loss, TrainOptions
from .states import Teacher
from .store import Text
from .team import Team

_BETAS = (0.9, 0.95)  # as the EAGLE-3 authors have them
_LOWEST = 0.05  # of the rate, at the end
_TESTS = 10  # over the run
_TEST_TOKENS = 12_000
_ENTRY_EVERY = 10  # steps
_DRAW_SECONDS = 60.0


class Task(Protocol):
    """A kind of head."""

    head: Any
    parameters: list[nn.Parameter]
    num_positions: int

    def num_steps(self, progress: float) -> int:
        """How many positions are learnt, by how far the training is."""

    def learn(self, pack: Pack, num_steps: int, loss: Loss, scale: float) -> Tally:
        """Add this pack's gradient."""

    def test(self, pack: Pack, loss: Loss) -> Tally:
        """Judge, without learning."""


@dataclass(slots=True)
class Status:
    """Where a training stands. tokens: of packs learnt, prompts included; answer_tokens: those with a loss."""

    step: int = 0
    num_steps: int = 0
    tokens: int = 0
    tokens_per_second: float = 0.0
    recent: Tally = field(default_factory=Tally)
    shown: Tally = field(default_factory=Tally)  # of the last full entry
    held_out: Tally = field(default_factory=Tally)

    def describe(self) -> str:
        tally = self.shown if self.shown.rows else self.recent
        loss, shares = tally.mean("loss"), " ".join(f"{share:.2f}" for share in tally.mean("hits"))
        text = f"step {self.step}/{self.num_steps}, {self.tokens_per_second:.0f} tokens/s"
        text += f", loss {loss[0]:.3f}, right {shares}" if loss else ""
        if self.held_out.rows:
            text += f", held out {' '.join(f'{share:.2f}' for share in self.held_out.mean('hits'))}"
        return text


class Trainer:
    """folder: for the checkpoint and the curves. Raises OptionError if the checkpoint there is of another run."""

    def __init__(
        self,
        options: TrainOptions,
        task: Task,
        teacher: Teacher,
        train: Sequence[Text],
        held_out: Sequence[Text],
        folder: Path,
        *,
        identity: dict[str, Any],
        team: Team | None = None,
        say: Callable[[str], None] = lambda _line: None,
    ):
        self.options, self.task, self.teacher, self.train, self.folder = options, task, teacher, train, folder
        self.team, self.say, self.identity = team or Team(), say, identity
        self.device = teacher.device
        self.packs = [packed for epoch in range(options.epochs)
                      for packed in plan(train, options.batch_tokens, options.seed, epoch)]  # fmt: skip
        self.tests = [self._pack(texts) for texts in _test_packs(held_out, options)] if self.team.leads else []
        self.status = Status(num_steps=-(-len(self.packs) // self.team.size))
        self.optimizer = torch.optim.AdamW(_groups(task.parameters, options.weight_decay),
                                           lr=options.learning_rate, betas=_BETAS)  # fmt: skip
        self.dtype = precision(options.precision, self.device)
        self.path = folder / "checkpoint.pt"
        self._restore()
        self.curves = Curves(folder / "curves.jsonl", self.status.step) if self.team.leads else None
        self._saved = self._drawn = time.monotonic()

    # -- the loop ------------------------------------------------------------------------------------------------

    def run(self, watch: Callable[[Status], None] = lambda _status: None, stop_at: int | None = None) -> Status:
        """Train to the end, or up to a step. watch: called after every step."""
        status = self.status
        last = status.num_steps if stop_at is None else min(stop_at, status.num_steps)
        began, tokens = time.monotonic(), status.tokens
        try:
            while status.step < last:
                self._step()
                status.tokens_per_second = (status.tokens - tokens) / max(time.monotonic() - began, 1e-9)
                self._record()
                watch(status)
                if time.monotonic() - self._saved > self.options.checkpoint_seconds:
                    self.save()
        except KeyboardInterrupt:
            self.save()
            raise
        self.save()
        return status

    def _step(self) -> None:
        status, size = self.status, self.team.size
        progress = status.step / status.num_steps
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.learning_rate * self._rate(progress)
        self.optimizer.zero_grad(set_to_none=True)
        mine = status.step * size + self.team.rank
        if mine < len(self.packs):
            texts = [self.train[index] for index in self.packs[mine]]
            packed = self._pack(texts)
            with self._products():
                tally = self.task.learn(packed, self.task.num_steps(progress), self.options.loss, 1.0)
            status.recent.merge(tally)
        self.team.average(self.task.parameters)
        norm = nn.utils.clip_grad_norm_(self.task.parameters, self.options.clip)
        if bool(norm.isfinite()):  # a step that overflowed teaches nothing
            self.optimizer.step()
        status.tokens += sum(len(self.train[i].ids) for own in self.packs[status.step * size :][:size] for i in own)
        status.step += 1

    def _rate(self, progress: float) -> float:
        """Up in a line, down along a cosine."""
        warmup = self.options.warmup
        if progress < warmup:
            return (progress * self.status.num_steps + 1) / (warmup * self.status.num_steps + 1)
        done = (progress - warmup) / (1 - warmup)
        return _LOWEST + (1 - _LOWEST) * 0.5 * (1 + math.cos(math.pi * done))

    def _pack(self, texts: Sequence[Text]) -> Pack:
        return pack(self.teacher.lessons(texts), self.teacher.draft_of_V, self.device)

    def _products(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    # -- judging -------------------------------------------------------------------------------------------------

    def test(self) -> Tally:
        """On held-out texts, in float32."""
        tally = Tally()
        for packed in self.tests:
            tally.merge(self.task.test(packed, self.options.loss))
        return tally

    def _record(self) -> None:
        status = self.status
        last = status.step == status.num_steps
        if status.step % _ENTRY_EVERY == 0 or last:
            self._enter("train", status.recent)
            status.shown, status.recent = status.recent, Tally()
        every = max(1, status.num_steps // _TESTS)
        if self.team.leads and self.tests and (status.step % every == 0 or last):
            status.held_out = self.test()
            self._enter("held_out", status.held_out)
            if self.curves is not None and time.monotonic() - self._drawn > _DRAW_SECONDS:
                self._drawn = time.monotonic()
                self.curves.draw(self.folder / "curves.png")

    def _enter(self, split: str, tally: Tally) -> None:
        if self.curves is None or not tally.rows:
            return
        self.curves.add(
            {
                "step": self.status.step,
                "split": split,
                "tokens": self.status.tokens,
                "loss": [round(value, 5) for value in tally.mean("loss")],
                "accuracy": [round(value, 5) for value in tally.mean("hits")],
                "overlap": [round(value, 5) for value in tally.mean("overlap")],
                "acceptance_length": round(tally.acceptance_length, 4),
                "learning_rate": self.optimizer.param_groups[0]["lr"],
            }
        )

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint. A full disk is told of and tried again later; the one before stays."""
        self._saved = time.monotonic()
        if not self.team.leads:
            return
        content = {
            "identity": self.identity,
            "step": self.status.step,
            "tokens": self.status.tokens,
            "parameters": [parameter.detach().cpu() for parameter in self.task.parameters],
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "dtype": str(self.dtype),
        }
        try:
            checkpoint.save(self.path, content)
        except OSError as error:
            self.say(f"{self.path} could not be written ({error.strerror}); the one before stays. Make room")

    def _restore(self) -> None:
        content = checkpoint.load(self.path, self.identity)
        if content is None:
            return
        with torch.no_grad():
            for parameter, value in zip(self.task.parameters, content["parameters"], strict=True):
                parameter.copy_(value.to(parameter.device))
        self.optimizer.load_state_dict(content["optimizer"])
        torch.set_rng_state(content["rng"])
        self.status.step, self.status.tokens = int(content["step"]), int(content["tokens"])
        if content["dtype"] != str(self.dtype):
            self.say(f"precision was {content['dtype']} before and is {self.dtype} from here on")
        self.say(f"going on at step {self.status.step} of {self.status.num_steps}")


def precision(name: str, device: torch.device) -> torch.dtype:
    """What products are done in. auto: bfloat16 where the hardware multiplies it."""
    if name != "auto":
        return torch.bfloat16 if name == "bfloat16" else torch.float32
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    able = device.type == "cpu" and any(torch.cpu.get_capabilities().get(name) for name in ("avx512_bf16", "amx_tile"))
    return torch.bfloat16 if able else torch.float32


def _groups(parameters: Sequence[nn.Parameter], decay: float) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in parameters if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def _test_packs(held_out: Sequence[Text], options: TrainOptions) -> list[list[Text]]:
    """Some texts of every kind, up to a number of tokens, in packs."""
    chosen: list[Text] = []
    for own in plan(held_out, options.batch_tokens, options.seed, -1):
        if sum(len(text.ids) for text in chosen) < _TEST_TOKENS:
            chosen += [held_out[index] for index in own]
    return [[chosen[i] for i in own] for own in plan(chosen, options.batch_tokens, options.seed, -1)]


def draft_vocabulary(texts: Sequence[Text], size: int, num_ids: int, always: Sequence[int] = ()) -> list[int]:
    """The ids that answers have most often, ascending. always: those that must be in it. Where there are too few, the
    lowest ids fill up: in most vocabularies they are the most frequent ones."""
    size = min(size, num_ids)
    counts = torch.zeros(num_ids, dtype=torch.int64)
    for text in texts:
        counts += torch.bincount(torch.tensor(text.ids[text.num_prompt :]), minlength=num_ids)
    counts[list(always)] = int(counts.sum()) + 1
    order: Tensor = counts.sort(descending=True, stable=True).indices[:size]
    return sorted(int(token) for token in order)

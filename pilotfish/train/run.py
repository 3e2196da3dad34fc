"""`pilotfish train`: one command from a target to a head that drafts for it, and the bench that says what it is worth.

It does not know how anything is done; it is the order in which it is done. The one trick: every part keeps what it has
in one folder and begins by looking there, so starting again is going on.

    OUT/text/            what was collected           OUT/checkpoint.pt    of the training
    OUT/held_out.jsonl   prompts for the bench        OUT/curves.*         what it looked like
    OUT/head/            the finished head: give it to --draft-model
"""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..bench import BenchOptions, Report, print_report, run_bench
from ..errors import ModelError, OptionError
from ..heads.store import save_head
from ..models.load import Loaded, load
from ..models.options import LoadOptions
from .collect import collect
from .eagle3 import Eagle3Task, new_head
from .loop import Status, Task, Trainer, draft_vocabulary
from .medusa import MedusaTask, new_heads
from .options import Eagle3Options, MedusaOptions, TrainOptions
from .progress import Progress
from .states import Teacher
from .store import Text, TextStore, split, write_whole
from .team import Team

_BENCH_TOKENS = 96
_BENCH_DRAFTED = "8,auto"  # a fixed number shows what the head can, auto what it is worth
_LONGEST_BENCH_PROMPT = 700


@dataclass(frozen=True, slots=True)
class Trained:
    """head: its folder. status: how the training ended. report: of the bench, if it ran."""

    head: Path
    status: Status
    report: Report | None = None


def run_train(options: TrainOptions, model: str, given: Mapping[str, Any] | None = None) -> Trained:
    """Collect, train, save, bench.

    given: fields of `LoadOptions`. Without ``quantization`` it is int8 on a CPU, with which collecting is fastest: a
    head serves the target however its weights are kept. Raises OptionError for a folder or options that do not fit,
    PilotfishError for a full disk; what was done until then is kept.
    """
    folder = Path(options.out).expanduser()
    team = Team()
    target = load(model, **asdict(loading(given or {}, team)))
    if target.model.info.encoder_decoder:
        raise ModelError(f"{model} is an encoder-decoder model; heads are trained for decoder-only models")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"out: {folder} cannot be made: {error.strerror}") from error
    texts = _texts(options, target, folder, team)
    trainer, head = _trainer(options, target, texts, folder, team)
    status = _train(trainer, team)
    place = folder / "head"
    if not team.leads:
        return Trained(place, status)
    place = save_head(head, place, target, {"options": _notes(options), "held_out": _reached(status)})
    _say(f"the head is in {place}: use it with --method {_method(options)} --draft-model {place}")
    report = _bench(options, target, texts, place, folder)
    return Trained(place, status, report)


def loading(given: Mapping[str, Any], team: Team | None = None) -> LoadOptions:
    """How the target is loaded; see `run_train`."""
    values = dict(given)
    if team is not None and team.device is not None:
        values["device"] = str(team.device)
    options = LoadOptions(**values)
    plain = options.dtype in ("auto", "float32") and options.model_impl != "hf"
    if "quantization" not in values and plain and options.torch_device.type == "cpu":
        return replace(options, quantization="int8")
    return options


# -- texts -----------------------------------------------------------------------------------------------------------


def _texts(options: TrainOptions, target: Loaded, folder: Path, team: Team) -> list[Text]:
    """What is in the store, filled up unless a training has begun: its texts must stay what they were."""
    info = target.model.info
    about = {"vocab_size": info.vocab_size, "hidden_size": info.hidden_size, "num_layers": len(info.layers)}
    if not team.leads:
        team.wait()
    with TextStore(folder / "text", about) as store:
        if team.leads:
            if store.found.torn_bytes:
                _say(f"{store.folder}: {store.found.torn_bytes} bytes of an unfinished record were cut off")
            begun = (folder / "checkpoint.pt").exists()
            if not begun and store.num_tokens < options.num_tokens:
                _collect(options, target, store)
            if begun and store.num_tokens < options.num_tokens:
                _say(f"{store.num_tokens} tokens were collected when the training began, and it goes on with these")
        texts = [text for text in store.texts if text.num_answer >= 3 and len(text.ids) <= options.max_length]
    if team.leads:
        team.wait()
    if not texts:
        raise OptionError(f"there are no texts in {folder / 'text'}: raise num_tokens, or give other prompts")
    return texts


def _collect(options: TrainOptions, target: Loaded, store: TextStore) -> None:
    start = store.num_tokens
    with Progress("collecting", options.num_tokens, start) as progress:

        def watch(done: Any) -> None:
            rate = (done.num_tokens + done.num_written) / max(progress.seconds, 1e-9)
            progress.show(store.num_tokens, f"{len(store.texts)} texts, {rate:.0f} tokens/s")

        try:
            collect(options, target, store, say=progress.say, watch=watch)
        except KeyboardInterrupt:
            store.sync(force=True)
            progress.say(f"stopped; {store.num_tokens} tokens are kept: start again with the same folder to go on")
            raise
    kinds = Counter[str]()
    for text in store.texts:
        kinds[text.kind] += text.num_answer
    shares = ", ".join(f"{name} {count / store.num_tokens:.0%}" for name, count in kinds.most_common())
    _say(f"collected {store.num_tokens} answer tokens in {len(store.texts)} texts: {shares}")


# -- training --------------------------------------------------------------------------------------------------------


def _trainer(
    options: TrainOptions, target: Loaded, texts: Sequence[Text], folder: Path, team: Team
) -> tuple[Trainer, Any]:
    parts = split(texts, options.holdout)
    if not parts.train:
        raise OptionError(f"all {len(texts)} texts are held out: lower holdout, or raise num_tokens")
    model = target.model
    info, ends = model.info, model.ends()
    eos = [token for token in info.eos_ids if token < info.vocab_size]
    draft_ids = draft_vocabulary(parts.train, options.draft_vocab_size, info.vocab_size, eos)
    finish: Callable[[Tensor], Tensor] = lambda states_TD: states_TD  # noqa: E731
    task: Task
    if isinstance(options, Eagle3Options):
        table_VD = ends.embed(torch.arange(info.vocab_size, device=info.device))
        head: Any = new_head(model, options, draft_ids, lambda tokens_T: F.embedding(tokens_T, table_VD))
        layers, task = head.config.taps, Eagle3Task(head, options)
    else:
        assert isinstance(options, MedusaOptions)
        head = new_heads(model, options, draft_ids)
        layers, task, finish = (len(info.layers) - 1,), MedusaTask(head, options), ends.norm
    if team.leads:
        _say_about(options, task, parts.train, parts.held_out, draft_ids)
    num_bytes = int(options.state_cache * 2**30) if options.epochs > 1 else 0  # a text met once is not worth keeping
    teacher = Teacher(model, layers, draft_ids, finish=finish, folder=folder, cache_bytes=num_bytes)
    identity = {
        **options.identity(),
        "kind": _method(options),
        "texts": _digest(parts.train),
        "processes": team.size,
    }
    say = _say if team.leads else lambda _line: None
    trainer = Trainer(
        options, task, teacher, parts.train, parts.held_out, folder, identity=identity, team=team, say=say
    )
    return trainer, head


def _train(trainer: Trainer, team: Team) -> Status:
    status = trainer.status
    with Progress("training", status.num_steps, status.step, quiet=not team.leads) as progress:
        trainer.say = progress.say
        try:
            trainer.run(lambda now: progress.show(now.step, now.describe()))
        except KeyboardInterrupt:
            progress.say(f"stopped at step {status.step}; start again with the same folder to go on")
            raise
    if trainer.curves is not None:
        trainer.curves.draw(trainer.folder / "curves.png")
    if not status.held_out.rows and trainer.tests and team.leads:  # gone on with what was finished already
        status.held_out = trainer.test()
    return status


def _say_about(
    options: TrainOptions, task: Task, train: Sequence[Text], held_out: Sequence[Text], draft_ids: Sequence[int]
) -> None:
    known = set(draft_ids)
    answers = [token for text in train for token in text.ids[text.num_prompt :]]
    covered = sum(token in known for token in answers) / len(answers)
    size = sum(parameter.numel() for parameter in task.parameters) / 1e6
    _say(
        f"training {_method(options)}, {size:.1f} million weights, on {len(answers)} answer tokens of {len(train)} "
        f"texts ({len(held_out)} held out); its {len(draft_ids)} tokens are {covered:.1%} of the answers"
    )


# -- the end ---------------------------------------------------------------------------------------------------------


def _bench(options: TrainOptions, target: Loaded, texts: Sequence[Text], head: Path, folder: Path) -> Report | None:
    """The head on held-out prompts, beside plain decoding."""
    if options.bench_limit == 0:
        return None
    held_out = [text for text in split(texts, options.holdout).held_out if text.num_prompt <= _LONGEST_BENCH_PROMPT]
    room = target.model.info.context - max((text.num_prompt for text in held_out), default=0)
    if not held_out or room < 2:
        _say("no prompts were held out, so there is nothing to bench with")
        return None
    path = folder / "held_out.jsonl"
    lines = [json.dumps({"prompt": list(text.ids[: text.num_prompt]), "category": text.kind or "text"})
             for text in held_out]  # fmt: skip
    write_whole(path, ("\n".join(lines) + "\n").encode())
    bench = BenchOptions(
        prompts=str(path),
        limit=options.bench_limit,
        repeats=1,
        max_tokens=min(_BENCH_TOKENS, room),
        num_speculative_tokens=_BENCH_DRAFTED,
    )
    report = run_bench(bench, target, [{"method": _method(options), "model": str(head)}])
    print_report(report)
    return report


def _method(options: TrainOptions) -> str:
    return "eagle3" if isinstance(options, Eagle3Options) else "medusa"


def _notes(options: TrainOptions) -> dict[str, Any]:
    return options.identity() | {"num_tokens": options.num_tokens}


def _reached(status: Status) -> dict[str, Any]:
    tally = status.held_out
    return {
        "accuracy": [round(value, 4) for value in tally.mean("hits")],
        "overlap": [round(value, 4) for value in tally.mean("overlap")],
        "steps": status.step,
    }


def _digest(texts: Sequence[Text]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        digest.update(str(hash(text.ids)).encode())  # of a tuple of ints: the same in every process
    return digest.hexdigest()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

"""The run: prompt by prompt, all engines take turns, and who begins moves on with every prompt.

It does not know any engine. The one trick: whatever fails is dropped by name and the others go on; what was measured
is on disk by then.
"""

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..progress import Progress
from .client import Client, WorkerDiedError, WorkerError
from .engines import Engine, Process, Variant, table
from .environments import InstallError, interpreter
from .journal import Journal, Load, Run
from .task import Task

WORKERS = Path(__file__).parent / "workers"
_WARMUP_ROWS, _WARMUP_TOKENS = 32, 8
_SETTLE_SECONDS = 0.3  # engines spin for up to 0.2 s after their work, then they sleep
_SHARE_OF_FREE = 0.8


@dataclass(slots=True)
class Outcome:
    """journal: what was measured. failures: (what, why). left_out: what was not tried, and why. groups: labels of the
    processes that were loaded together, where not all were."""

    journal: Journal
    failures: list[tuple[str, str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    groups: list[list[str]] = field(default_factory=list)
    interrupted: bool = False


@dataclass(slots=True)
class _Worker:
    """A process of the table that is loaded. variants: those that still work."""

    process: Process
    client: Client
    variants: list[Variant]


@dataclass(frozen=True, slots=True)
class _Turn:
    worker: _Worker
    variant: Variant


def run_peers(task: Task, engines: Sequence[Engine] | None = None, settle: float = _SETTLE_SECONDS) -> Outcome:
    """Install, load and measure (engines: the table's). Ctrl-C ends it; what was measured until then is returned.

    settle: seconds of rest before each turn. Raises OptionError if the journal holds another run.
    """
    outcome = Outcome(Journal(task.options.journal, task.header(), task.options.fresh))
    try:
        _Driver(task, outcome, settle).run(table(task.options) if engines is None else engines)
    except KeyboardInterrupt:
        outcome.interrupted = True
    return outcome


def pack(processes: Sequence[Process], num_bytes: Callable[[Process], float], room: float) -> list[list[Process]]:
    """Groups of neighbours that fit into the room together; one that does not fit alone is a group alone."""
    groups: list[list[Process]] = []
    held = 0.0
    for process in processes:
        size = num_bytes(process)
        if not groups or held + size > room:
            groups.append([])
            held = 0.0
        groups[-1].append(process)
        held += size
    return groups


class _Driver:
    def __init__(self, task: Task, outcome: Outcome, settle: float):
        self.task, self.outcome, self.options, self.settle = task, outcome, task.options, settle
        self.logs = task.home / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.console = Console(stderr=True, highlight=False)
        self.pythons: dict[str, Path] = {}
        self.scripts: dict[str, Path] = {}
        self.prepared: dict[tuple[str, str, bool], bool] = {}

    def run(self, engines: Sequence[Engine]) -> None:
        done = self.outcome.journal.done()
        wanted = [process for engine in engines for process in self._install(engine)]
        waiting = [process for process in wanted if self._missing(process, done)]
        ready = [process for process in waiting if self._prepare(process)]
        groups = pack(ready, self._bytes, self._room())
        if len(groups) > 1:
            self.outcome.groups = [[f"{p.engine} {p.weights}" for p in group] for group in groups]
        total = sum(len(self._missing(process, done)) for process in ready)
        with Progress(total) as progress:
            for group in groups:
                self._measure(group, done, progress)

    # -- before anything is measured -----------------------------------------------------------------------------

    def _install(self, engine: Engine) -> list[Process]:
        """The engine's processes, without what cannot run here."""
        if engine.needs_gguf and self.task.gguf is None:
            self.outcome.left_out.append(f"{engine.name}: needs the model as a GGUF file; name it with --gguf")
            return []
        python = Path(sys.executable)
        if engine.requirements is not None:
            folder = self.task.home / engine.requirements.removesuffix(".txt")
            try:
                python = interpreter(folder, engine.requirements, engine.build, self.options.pip_flags, self._say)
            except InstallError as error:
                self._fail(engine.name, str(error))
                return []
        processes = []
        for process in engine.processes:
            if process.weights == "gguf" and self.task.gguf is None:
                self.outcome.left_out.append(f"{engine.name} gguf: needs the model as a GGUF file; name it with --gguf")
                continue
            fitting = tuple(v for v in process.variants if not v.needs_draft or self.task.draft_model is not None)
            without = [process.label(v.name) for v in process.variants if v not in fitting]
            self.outcome.left_out += [f"{name}: needs --draft-model" for name in without]
            if fitting:
                processes.append(replace(process, variants=fitting))
        self.pythons[engine.name], self.scripts[engine.name] = python, WORKERS / engine.script
        return processes

    def _missing(self, process: Process, done: set[tuple[int, str, str, str]]) -> list[tuple[int, str]]:
        return [
            (prompt, variant.name)
            for prompt in range(len(self.task.ids))
            for variant in process.variants
            if (prompt, process.engine, process.weights, variant.name) not in done
        ]

    def _prepare(self, process: Process) -> bool:
        """Let the worker make its files, in a process that is gone when memory is counted."""
        needs_draft = any(variant.needs_draft for variant in process.variants)
        key = process.engine, process.weights, needs_draft
        if key not in self.prepared:
            self.prepared[key] = self._make_files(process)
        return self.prepared[key]

    def _make_files(self, process: Process) -> bool:
        self._say(f"preparing {process.engine} {process.weights}")
        client = self._start(process)
        try:
            client.ask("prepare", **self._settings(process))
        except WorkerError as error:
            self._fail(f"{process.engine} {process.weights}", str(error))
            return False
        finally:
            client.close()
        return True

    def _start(self, process: Process) -> Client:
        name = re.sub(r"[^\w.-]+", "-", f"{process.engine}-{process.weights}-{process.variants[0].name}")
        environment = {"OMP_NUM_THREADS": str(self.options.num_threads), "TOKENIZERS_PARALLELISM": "false"}
        python, script = self.pythons[process.engine], self.scripts[process.engine]
        return Client(python, script, self.logs / f"{name}.log", self.options.timeout, environment)

    def _settings(self, process: Process) -> dict[str, Any]:
        task = self.task
        caches = [None if model is None else task.cache(model) for model in (task.model, task.draft_model)]
        for folder in caches:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
        return {
            "model": str(task.model),
            "draft_model": None if task.draft_model is None else str(task.draft_model),
            "gguf": None if task.gguf is None else str(task.gguf),
            "cache": str(caches[0]),
            "draft_cache": None if caches[1] is None else str(caches[1]),
            "threads": self.options.num_threads,
            "context": task.context,
            "stop_ids": list(task.stop_ids),
            "weights": process.weights,
            "variants": {variant.name: dict(variant.settings) for variant in process.variants},
        }

    def _bytes(self, process: Process) -> float:
        target, draft = self.task.num_weights
        needs_draft = any(variant.needs_draft for variant in process.variants)
        return process.bytes_per_weight * (target + draft * needs_draft) + process.spare_gb * 1e9

    def _room(self) -> float:
        if self.options.memory_gb is not None:
            return self.options.memory_gb * 1e9
        try:
            lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        except (OSError, StopIteration):  # not Linux
            return float("inf")
        return _SHARE_OF_FREE * free

    # -- measuring -----------------------------------------------------------------------------------------------

    def _measure(self, group: Sequence[Process], done: set[tuple[int, str, str, str]], progress: Progress) -> None:
        workers: list[_Worker] = []
        try:
            for process in group:
                progress.show(f"loading {process.engine} {process.weights}")
                self._load(process, workers)
            for prompt in range(len(self.task.ids)):
                for turn in _rotated(workers, prompt):
                    if (prompt, turn.worker.process.engine, turn.worker.process.weights, turn.variant.name) not in done:
                        progress.show(turn.worker.process.label(turn.variant.name))
                        self._run(prompt, turn, workers)
                        progress.advance()
        finally:
            for worker in workers:
                worker.client.close()

    def _load(self, process: Process, workers: list[_Worker]) -> None:
        client = self._start(process)
        worker = _Worker(process, client, list(process.variants))
        workers.append(worker)
        try:
            about = client.ask("load", **self._settings(process))
        except WorkerError as error:
            self._fail(f"{process.engine} {process.weights} {', '.join(v.name for v in process.variants)}", str(error))
            client.close()
            workers.remove(worker)
            return
        names = tuple(variant.name for variant in process.variants)
        parts = {name: about[name] for name in ("seconds", "peak_bytes", "version", "precision")}
        self.outcome.journal.add(Load(process.engine, process.weights, names, **parts))
        warm_up = list(self.task.ids[0][:_WARMUP_ROWS])
        for variant in process.variants:
            self._ask(worker, variant, warm_up, _WARMUP_TOKENS, workers)

    def _run(self, prompt: int, turn: _Turn, workers: list[_Worker]) -> None:
        """One prompt with one variant, the others waiting."""
        if turn.worker not in workers or turn.variant not in turn.worker.variants:  # it failed meanwhile
            return
        time.sleep(self.settle)
        others = [worker.client for worker in workers if worker is not turn.worker]
        before, start = [client.cpu_seconds() for client in others], time.perf_counter()
        reply = self._ask(turn.worker, turn.variant, self.task.ids[prompt], self.options.max_tokens, workers)
        seconds = time.perf_counter() - start
        if reply is None:
            return
        idle = sum(client.cpu_seconds() - was for client, was in zip(others, before, strict=True))
        process = turn.worker.process
        self.outcome.journal.add(
            Run(
                prompt=prompt,
                category=self.task.prompts[prompt].category,
                engine=process.engine,
                weights=process.weights,
                variant=turn.variant.name,
                bursts=tuple((seconds, count) for seconds, count in reply["bursts"]),
                ids=tuple(reply["ids"]),
                peak_bytes=reply["peak_bytes"],
                idle_cpu=idle / seconds,
            )
        )

    def _ask(
        self, worker: _Worker, variant: Variant, ids: Sequence[int], max_tokens: int, workers: list[_Worker]
    ) -> dict[str, Any] | None:
        """The worker's answer; None if it failed, and then the variant, or the whole worker, is dropped."""
        try:
            return worker.client.ask("run", variant=variant.name, ids=list(ids), max_tokens=max_tokens)
        except WorkerDiedError as error:
            workers.remove(worker)
            lost = [other.name for other in worker.variants if other is not variant]
            also = f"; with it went {', '.join(lost)}" if lost else ""
            self._fail(worker.process.label(variant.name), f"{error}{also}")
        except WorkerError as error:
            worker.variants.remove(variant)
            self._fail(worker.process.label(variant.name), str(error))
        return None

    def _fail(self, what: str, why: str) -> None:
        self.outcome.failures.append((what, why))
        self.console.print(f"{what} failed: {why}", style="red", markup=False, soft_wrap=True)

    def _say(self, line: str) -> None:
        self.console.print(line, markup=False, soft_wrap=True)


def _rotated(workers: Sequence[_Worker], by: int) -> Iterator[_Turn]:
    turns = [_Turn(worker, variant) for worker in workers for variant in worker.variants]
    start = by % len(turns) if turns else 0
    yield from (*turns[start:], *turns[:start])

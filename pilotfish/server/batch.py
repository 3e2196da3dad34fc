"""`pilotfish batch`: a file of requests in, a file of answers out, in OpenAI's batch format, many at once.

It does not know HTTP or the engine: each line goes the way of a request, through `Server.answer`. The one trick: the
output is its own journal. A line is appended whole and synced to the disk before the next; on the next start a torn
last line is cut off, and what has an answer is not asked again. So nothing is lost or doubled, however it ends.

    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"id": ..., "custom_id": "1", "response": {"status_code": 200, "request_id": ..., "body": {...}}, "error": null}
"""

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import click
from pydantic_core import from_json, to_json
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..errors import OptionError, PilotfishError, UserError
from ..llm import LLM
from .app import Server
from .options import BatchOptions
from .refusals import Json, Refusal, of_user_error

log = logging.getLogger(__name__)
_FIELDS = {"custom_id", "method", "url", "body"}
_BEGINNING = b'{"id":"batch_req_'  # of a line of ours, as `to_json` writes it


def run_batch(options: BatchOptions, source: str | Path, target: str | Path, load: Callable[[], LLM]) -> None:
    """Answer what has no answer yet. load: makes the LLM, if there is something to do.

    Raises OptionError for files that cannot be used, naming the line: before the model is loaded.
    """

    def work(journal: Journal) -> None:
        batch = _Batch(Server(load(), options.serving()), journal)
        try:
            asyncio.run(batch.run())
        finally:
            batch.server.close()

    resumably(source, target, work)


def resumably(source: str | Path, target: str | Path, work: Callable[["Journal"], None]) -> None:
    """Have the lines that have no answer yet answered, however that is done. Raises as `run_batch`."""
    source, target = Path(source), Path(target)
    _check_files(source, target)
    ids = _read_ids(source)
    with _opened(target) as file:
        done = _recover(file, target, ids)
        if len(done) == len(ids):
            click.echo(f"all {len(ids)} answers are in {target}", err=True)
            return
        if done:
            click.echo(f"{len(done)} of {len(ids)} answers are there already; going on", err=True)
        journal = Journal(source, file, len(ids), done)
        try:
            with _progress(len(ids), len(done)) as journal.advance:
                work(journal)
        except KeyboardInterrupt:
            click.echo(f"{len(done)} of {len(ids)} answers are in {target}; the same command goes on", err=True)
            raise
        except OSError as error:
            raise OptionError(f"{error.filename or target}: {error.strerror}; the same command goes on") from error
        journal.tell(target)
        if len(done) < len(ids):
            raise OptionError(f"{len(ids) - len(done)} lines of {source} were gone when their turn came")


class Journal:
    """The output under way. done: the ids that have an answer, added to as they come."""

    def __init__(self, source: Path, file: BinaryIO, num_lines: int, done: set[str]):
        self.source, self.file, self.num_lines, self.done = source, file, num_lines, done
        self.num_failed = self.num_tokens = 0
        self.num_before, self.started = len(done), time.monotonic()
        self.advance: Callable[[str], None] = lambda _note: None

    def todo(self) -> Generator[Json]:
        """The lines without an answer."""
        with self.source.open("rb") as lines:
            for _, line in _lines(lines):
                if line["custom_id"] not in self.done:
                    yield line

    def keep(self, answer: Json) -> None:
        """Write an answer, so that it is there whatever happens next."""
        _append(self.file, answer)
        self.done.add(answer["custom_id"])
        self.num_failed += answer["error"] is not None
        body = answer["response"]["body"]
        self.num_tokens += body.get("usage", {}).get("completion_tokens", 0)
        self.advance(f"{self.num_failed} failed" if self.num_failed else "")

    def tell(self, target: Path) -> None:
        """What it came to."""
        seconds = time.monotonic() - self.started
        failed = f", {self.num_failed} of them errors" if self.num_failed else ""
        count, speed = len(self.done) - self.num_before, self.num_tokens / seconds
        click.echo(f"{count} answers added to {target}{failed}; {speed:.1f} tokens/s", err=True)


class _Batch:
    """Lines under way in one engine."""

    def __init__(self, server: Server, journal: Journal):
        self.server, self.journal = server, journal
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Answer all lines that are not done, as many at once as keep the engine busy."""
        width = 2 * self.server.llm.engine.options.max_num_seqs
        with contextlib.closing(self.journal.todo()) as todo:
            async with self.server.app.router.lifespan_context(self.server.app):
                workers = asyncio.gather(*(self._work(todo) for _ in range(width)))
                watch = asyncio.create_task(self._watch())
                both: set[asyncio.Future[Any]] = {workers, watch}
                try:
                    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                    (watch if watch.done() else workers).result()
                finally:
                    workers.cancel()
                    watch.cancel()
                    await asyncio.gather(workers, watch, return_exceptions=True)

    async def _work(self, todo: Iterator[Json]) -> None:
        for line in todo:
            answer = await answer_line(self.server, line)
            async with self._writing:
                await asyncio.shield(asyncio.to_thread(self.journal.keep, answer))

    async def _watch(self) -> None:
        """Without the engine's thread, lines would wait for ever."""
        while self.server.engine.ready:
            await asyncio.sleep(1)
        raise _stopped()


async def answer_line(server: Server, line: Json) -> Json:
    """A line of the output for one of the input. Raises PilotfishError if the engine's thread has ended."""
    try:
        _check(line)
        body, status = await server.answer(line["url"], line["body"]), 200
    except Refusal as refusal:
        if refusal.code == "shutting_down":  # the engine's thread has ended: that is no answer to anybody
            raise _stopped() from refusal
        body, status = refusal.body, refusal.status
    except UserError as error:
        body, status = of_user_error(error).body, 400
    except Exception:
        log.exception("line %s failed", line["custom_id"])
        body, status = Refusal(500, "the request failed; the log says why").body, 500
    told = None if status == 200 else {name: body["error"][name] for name in ("code", "message")}
    response = {"status_code": status, "request_id": body.get("id", ""), "body": body}
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": line["custom_id"],
        "response": response,
        "error": told,
    }


def _stopped() -> PilotfishError:
    return PilotfishError("the engine stopped; the log says why, and the same command goes on")


def _check(line: Json) -> None:
    """What is wrong with a line beyond its id is an answer too. Raises Refusal."""
    for name in line:
        if name not in _FIELDS:
            raise Refusal(400, f"{name}: unknown field of a line; known: {', '.join(sorted(_FIELDS))}", param=name)
    if line.get("method") != "POST":
        raise Refusal(400, f"method must be 'POST', not {line.get('method')!r}", param="method")
    if not isinstance(line.get("url"), str):
        raise Refusal(400, f"url must be a text such as /v1/chat/completions, not {line.get('url')!r}", param="url")
    if "body" not in line:
        raise Refusal(400, "body: this is missing", param="body")


# -- files ---------------------------------------------------------------------------------------------------------


def _lines(file: BinaryIO) -> Iterator[tuple[int, Json]]:
    """(line number, object) of each line that is not blank. Raises OptionError for one that is no object with an id."""
    for number, raw in enumerate(file, 1):
        if not raw.strip():
            continue
        place = f"{file.name}, line {number}"
        try:
            line = from_json(raw.rstrip(), allow_inf_nan=False)
        except ValueError as error:
            told = str(error).replace(" at line 1 column ", " at column ")  # of the one line that it was given
            raise OptionError(f"{place} is not JSON: {told}") from None
        if not isinstance(line, dict) or not isinstance(line.get("custom_id"), str) or not line["custom_id"]:
            raise OptionError(f"{place} has no custom_id: each line must be an object with one, a text")
        yield number, line


def _check_files(source: Path, target: Path) -> None:
    """Raises OptionError for what is no file, and for one file in both places, whatever it is called there."""
    for path, name in ((source, "questions"), (target, "answers")):
        if path.exists() and not path.is_file():
            raise OptionError(f"{path} is no regular file: the {name} are read more than once")
    if source.resolve() == target.resolve() or (source.exists() and target.exists() and source.samefile(target)):
        raise OptionError(f"{target} is both the questions and the answers: name another file for the answers")


def _read_ids(source: Path) -> set[str]:
    seen: dict[str, int] = {}
    try:
        with source.open("rb") as file:
            for number, line in _lines(file):
                first = seen.setdefault(line["custom_id"], number)
                if first != number:
                    raise OptionError(
                        f"{source}: lines {first} and {number} have the same custom_id {line['custom_id']!r}"
                    )
    except OSError as error:
        raise OptionError(f"{source} cannot be read: {error.strerror}") from error
    if not seen:
        raise OptionError(f"{source} has no lines")
    return set(seen)


@contextlib.contextmanager
def _opened(target: Path) -> Iterator[BinaryIO]:
    """The output, ours alone: two processes with one output would answer everything twice."""
    try:
        file = target.open("a+b")
    except OSError as error:
        raise OptionError(f"{target} cannot be written: {error.strerror}") from error
    with file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ModuleNotFoundError:
            pass  # not on Windows
        except BlockingIOError:
            raise OptionError(f"another process is writing {target}") from None
        yield file


def _recover(journal: BinaryIO, target: Path, ids: set[str]) -> set[str]:
    """The ids that have an answer; cuts off a torn last line. Raises OptionError for anything that is not ours."""
    done: set[str] = set()
    journal.seek(0)
    end = 0
    for number, raw in enumerate(journal, 1):
        # Behind answers of this very batch, or begun like one: else somebody's file would lose its last line.
        if not raw.endswith(b"\n") and (end or raw.startswith(_BEGINNING) or _BEGINNING.startswith(raw)):
            break
        end += len(raw)
        own = _answered(raw)
        if own is None:
            raise OptionError(f"{target}, line {number} is no answer of a batch: name another file")
        if own not in ids:
            raise OptionError(f"{target} answers {own!r}, which is not asked: it belongs to another batch")
        done.add(own)
    journal.truncate(end)
    journal.seek(0, os.SEEK_END)
    return done


def _answered(raw: bytes) -> str | None:
    """The custom_id of an answer's line; None if it is none."""
    try:
        line: Any = from_json(raw)
    except ValueError:
        return None
    whole = isinstance(line, dict) and {"id", "custom_id", "response", "error"} <= line.keys()
    return line["custom_id"] if whole and isinstance(line["custom_id"], str) else None


def _append(journal: BinaryIO, answer: Json) -> None:
    journal.write(to_json(answer) + b"\n")
    journal.flush()
    os.fsync(journal.fileno())


@contextlib.contextmanager
def _progress(num_lines: int, num_done: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal; nothing elsewhere. Yields what is to be called per answer, with a remark."""
    console = Console(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=num_lines, completed=num_done, note="")
        yield lambda note: progress.update(task, advance=1, note=note)

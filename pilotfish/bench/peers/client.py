"""The driver's end of a worker: a process that is asked one thing at a time and may die at any.

It does not know engines. The one trick: a thread reads the answers into a queue, so waiting has an end.
"""

import contextlib
import json
import os
import queue
import subprocess
import threading
from pathlib import Path
from typing import Any

from ...errors import PilotfishError

SERVE = Path(__file__).parent / "workers" / "serve.py"
_PATIENCE = 2.0  # seconds to leave in peace
_TAIL = 400  # characters of the log in a message


class WorkerError(PilotfishError):
    """The worker answered with an error."""


class WorkerDiedError(WorkerError):
    """The worker is gone: it died, or was silent too long and was ended."""


class Client:
    """Starts ``python serve.py script`` in a process group of its own, so that Ctrl-C reaches the driver alone.

    log: what the engine prints.
    """

    def __init__(self, python: Path, script: Path, log: Path, timeout: float, environment: dict[str, str]):
        self._log, self._timeout = log, timeout
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [str(python), str(SERVE), str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                encoding="utf-8",
                start_new_session=True,
                env=os.environ | environment,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def ask(self, do: str, **values: Any) -> dict[str, Any]:
        """Raises WorkerError with the worker's words, WorkerDiedError if there is no answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=self._timeout)
        except BrokenPipeError:
            line = ""
        except queue.Empty:
            self.close()
            raise WorkerDiedError(f"no answer to {do!r} within {self._timeout:.0f} s; the log is {self._log}") from None
        if not line:
            self.close()
            raise WorkerDiedError(f"died with status {self._process.returncode} at {do!r}: {self._last_words()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerError(f"{reply['error']} (log: {self._log})")
        return reply

    def cpu_seconds(self) -> float:
        """Processor time it has used so far; 0 where the system does not say."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / float(os.sysconf("SC_CLK_TCK"))

    def close(self) -> None:
        """End it: by the end of its input if it listens, else by force."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        idle = self._answers.empty()
        try:
            process.wait(_PATIENCE if idle else 0.1)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._reader.join(_PATIENCE)
        process.stdout.close()

    def _last_words(self) -> str:
        text = self._log.read_text(encoding="utf-8", errors="replace").strip()
        return f"{text[-_TAIL:].rpartition(chr(10))[2] or 'it said nothing'} (log: {self._log})"

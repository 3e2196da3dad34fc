"""What one sees while training runs: a bar on a terminal, a line now and then elsewhere. stdout belongs to results.

It does not know what is counted.
"""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

_EVERY = 30.0  # seconds between lines where there is no terminal


class Progress:
    """Counts up to ``total``. start: where an earlier run stopped; the rate is this run's own. quiet: shows nothing."""

    def __init__(self, title: str, total: int, start: int = 0, *, quiet: bool = False):
        self.title, self.total, self.start, self.quiet = title, total, start, quiet
        self.done, self.began, self.shown = start, time.monotonic(), time.monotonic()
        console = Console(file=sys.stderr)
        self.on_terminal = console.is_terminal and not quiet
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[about]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not self.on_terminal,
            speed_estimate_period=600,
        )
        self._task = self._bar.add_task(title, total=total, completed=start, about="")

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        self._line(self.about)

    about = ""

    def show(self, done: int, about: str) -> None:
        """So much is done; about: what else there is to say."""
        self.done, self.about = done, about
        self._bar.update(self._task, completed=done, about=about)
        now = time.monotonic()
        if now - self.shown > _EVERY:
            self.shown = now
            self._line(about)

    def say(self, line: str) -> None:
        """A line of its own."""
        if not self.quiet:
            self._bar.console.print(line, soft_wrap=True, markup=False, highlight=False)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def _line(self, about: str) -> None:
        if self.on_terminal or self.quiet:
            return
        gained = self.done - self.start
        left = self.seconds * (self.total - self.done) / gained if gained > 0 else float("nan")
        to_go = "?" if left != left else f"{left / 60:.1f} min"
        share = self.done / self.total if self.total else 1.0
        print(f"{self.title}: {share:.0%}, {about}, {to_go} to go", file=sys.stderr, flush=True)

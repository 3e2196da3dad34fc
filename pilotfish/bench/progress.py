"""A progress bar on stderr, with the time that remains. stdout belongs to the results."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

_MEMORY_SECONDS = 3600.0  # runs take long: the speed is judged by all of them, not by the last half minute


class Progress:
    """Counts runs up to ``total``. Shows nothing where stderr is not a terminal."""

    def __init__(self, total: int):
        console = Console(stderr=True)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("runs,"),
            TimeElapsedColumn(),
            TextColumn("gone,"),
            TimeRemainingColumn(),
            TextColumn("to go"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            speed_estimate_period=_MEMORY_SECONDS,
        )
        self._task = self._bar.add_task("loading", total=total)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, text: str) -> None:
        """Say what is running."""
        self._bar.update(self._task, description=text)

    def advance(self) -> None:
        """One more run is done."""
        self._bar.advance(self._task)

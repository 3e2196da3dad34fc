"""Runs what was asked for, pair by pair, and writes the report, whatever was reached.

It does not know how anything is measured. The one trick: it has no state; the record has.
"""

from contextlib import nullcontext
from pathlib import Path

from ..errors import OptionError
from ..models.disk_cache import cache_folder
from . import figures
from .journal import Journal
from .measure import Measuring
from .options import ReproduceOptions
from .pairs import Pair, one_thread, pairs_of
from .report import write


def run(options: ReproduceOptions) -> tuple[Path, bool]:
    """The report's page, and whether Ctrl-C came before the end. Raises OptionError for folders that cannot be
    written, and all that loading models raises."""
    figures.check()
    out = _folder(options.out)
    work = _folder(options.work or str(cache_folder() / "reproduce"))
    results, texts = Journal(out / "results.jsonl"), Journal(work / "texts.jsonl")
    interrupted = False
    try:
        for pair in pairs_of(options, work, texts.once):
            with one_thread() if pair.kind == "spoken" else nullcontext():
                _measure(pair, options, results, texts, work)
    except KeyboardInterrupt:
        interrupted = True
    return write(results, out), interrupted


def _measure(pair: Pair, options: ReproduceOptions, results: Journal, texts: Journal, work: Path) -> None:
    """The parts that were asked for; those of the pair that is trained here are one part."""
    own = ("g2p", "g2p") if pair.kind == "spoken" else ("alpha", "speed")
    alpha, speed = (part in options.parts for part in own)
    if not alpha and not speed:
        return
    opened = pair.open()
    info = opened.target.model.info
    weights = info.quantization if info.quantization != "none" else str(info.dtype).removeprefix("torch.")
    about = {"name": f"{pair.name} ({weights})", "kind": pair.kind, "notes": dict(opened.notes)}
    results.once(f"pair | {pair.key}", lambda: about)
    measuring = Measuring(pair, opened, options, results, texts)
    if alpha:
        measuring.alpha()
    if speed:
        measuring.speed(work)


def _folder(name: str) -> Path:
    path = Path(name).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"{path} cannot be made: {error.strerror}") from error
    return path

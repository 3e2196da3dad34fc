"""Measuring: plain decoding against each method, on one target, in turns. `measure` runs, `results` defines."""

from typing import TYPE_CHECKING

from .. import lazily

if TYPE_CHECKING:
    from .measure import run_bench
    from .options import BenchOptions
    from .report import print_report
    from .results import Report, Row

__all__ = ["BenchOptions", "Report", "Row", "print_report", "run_bench"]
__getattr__ = lazily.names(
    __name__,
    {
        "BenchOptions": "options",
        "Report": "results",
        "Row": "results",
        "print_report": "report",
        "run_bench": "measure",
    },
)

"""Measuring: plain decoding against each method, on one target, in turns. `measure` runs, `results` defines."""

from .measure import run_bench
from .options import BenchOptions
from .report import print_report
from .results import Report, Row

__all__ = ["BenchOptions", "Report", "Row", "print_report", "run_bench"]

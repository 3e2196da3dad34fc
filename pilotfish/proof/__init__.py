"""What `pilotfish verify` does: proof, on the user's own models, that drafting does not change the text."""

from .options import VerifyOptions
from .report import Report, print_report
from .verify import run_verify

__all__ = ["Report", "VerifyOptions", "print_report", "run_verify"]

"""What `pilotfish verify` does: proof, on the user's own models, that drafting does not change the text."""

from typing import TYPE_CHECKING

from .. import lazily

if TYPE_CHECKING:
    from .options import VerifyOptions
    from .report import Report, print_report
    from .verify import run_verify

__all__ = ["Report", "VerifyOptions", "print_report", "run_verify"]
__getattr__ = lazily.names(
    __name__, {"Report": "report", "VerifyOptions": "options", "print_report": "report", "run_verify": "verify"}
)

"""The command line, a file per family of commands. Flags come from the option dataclasses.

It does not know how anything is done. The one trick: every error a user can mend leaves through one door, as one
line that names the value and the way out, with exit status 2. What a command does is imported when it runs.
"""

from . import measuring, serving, texts, training  # noqa: F401 -- each adds its commands
from .group import main

__all__ = ["main"]

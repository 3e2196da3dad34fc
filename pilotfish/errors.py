"""Everything pilotfish raises on purpose.

PilotfishError
├── UserError (also a ValueError)     the caller can mend it: the message names the value and the way out
│   ├── OptionError                   a parameter or an option is out of range, unknown or misspelt
│   ├── PromptError                   a prompt that cannot be served: empty, too long, not text
│   ├── ModelError                    a model that cannot be loaded or cannot work here
│   ├── DraftError                    a drafter that does not fit this target
│   └── CapacityError                 the page pool cannot hold even this one request
└── (nothing else: our own mistakes are AssertionErrors)
"""

import difflib
from collections.abc import Iterable


class PilotfishError(Exception):
    """Base of all errors raised on purpose."""


class UserError(PilotfishError, ValueError):
    """The caller can mend it."""


class OptionError(UserError):
    """A parameter or option is out of range, unknown or misspelt."""


class PromptError(UserError):
    """A prompt that cannot be served."""


class ModelError(UserError):
    """A model that cannot be loaded or cannot work here."""


class DraftError(UserError):
    """A drafter that does not fit this target."""


class CapacityError(UserError):
    """The page pool cannot hold even this one request."""


_LONGEST_NAME = 64


def unknown_name(kind: str, name: str, known: Iterable[str]) -> OptionError:
    """The error for a name nobody knows: it names the nearest one, or all if none is near."""
    names = sorted(known)
    name = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."  # it may be anything at all
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
    return OptionError(f"unknown {kind} {name!r}; {hint}")

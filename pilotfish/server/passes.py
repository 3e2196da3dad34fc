"""What a stream says of each pass, if its request asks with ``pilotfish: {"trace": true}``: which tokens were drafted
and by whom, the draft's tree, and how long it took beside plain decoding.

It does not know HTTP, and without a trace nothing of it is called. The one trick: a block's pieces, put together, are
the answer's text, so a reader may show them instead of the deltas and knows where every letter came from.

    "pilotfish": {
      "tokens": [" the", " sea", "."],   as written in log-probabilities; the first num_accepted were drafted
      "pieces": [" the", " sea", "."],   the text that became final with each, then any that had been held back
      "num_accepted": 2,
      "draft": {"method": "ngram", "tokens": [" the", " sea", "shore"], "parents": [-1, 0, 1],
                "accepted": [true, true, false]},                    or null
      "seconds": 0.021,                  since the completion's last tokens, or since it was asked for
      "pass_seconds": 0.020,             of the pass, drafting included; everyone in the batch shares it
      "plain_seconds": 0.013}            what this batch would take without drafts; null if that is not known
"""

from dataclasses import dataclass
from typing import Protocol

from ..engine.controller import Adaptive
from ..engine.engine import Engine, Guess
from .refusals import Json
from .spelling import Spelling


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass, as a completion saw it; times in seconds, as above."""

    guess: Guess | None
    seconds: float
    pass_seconds: float
    plain_seconds: float | None


def plain_seconds(engine: Engine, num_requests: int) -> float | None:
    """What the controller expects of a pass with one row for each of these requests. A fixed number of draft tokens
    needs no costs, so nobody has measured them."""
    return engine.controller.costs.seconds(num_requests) if isinstance(engine.controller, Adaptive) else None


class Emitted(Protocol):
    """What a pass gave; fields as in `Event`."""

    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def pieces(self) -> tuple[str, ...]: ...
    @property
    def num_accepted(self) -> int: ...


def block(passed: Pass, emitted: Emitted, spelling: Spelling) -> Json:
    """A pass as it is written into a chunk."""
    guess = passed.guess
    draft = guess and {
        "method": guess.method,
        "tokens": [spelling.spell(token)[0] for token in guess.tokens],
        "parents": guess.parents,
        "accepted": [node in guess.accepted for node in range(len(guess.tokens))],
    }
    return {
        "tokens": [spelling.spell(token)[0] for token in emitted.tokens],
        "pieces": emitted.pieces,
        "num_accepted": emitted.num_accepted,
        "draft": draft,
        "seconds": round(passed.seconds, 6),
        "pass_seconds": round(passed.pass_seconds, 6),
        "plain_seconds": passed.plain_seconds and round(passed.plain_seconds, 6),
    }

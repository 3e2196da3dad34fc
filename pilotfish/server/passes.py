"""What a stream says of each pass, if its request asks with ``pilotfish: {"trace": true}``: which tokens were drafted
and by whom, the draft's tree, and how long it took beside plain decoding.

It does not know HTTP, and without a trace nothing of it is called. The one trick: a block's pieces, put together, are
the answer's text, so a reader may show them instead of the deltas and knows where every letter came from. All but the
times is as in any trace (`pilotfish.trace`).

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

from ..engine.controller import Adaptive
from ..engine.engine import Engine, Guess
from ..models.words import Spelling
from ..trace import Emitted, seen
from .refusals import Json


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


def block(passed: Pass, emitted: Emitted, spelling: Spelling) -> Json:
    """A pass as it is written into a chunk."""
    return {
        **seen(emitted, passed.guess, spelling),
        "seconds": round(passed.seconds, 6),
        "pass_seconds": round(passed.pass_seconds, 6),
        "plain_seconds": passed.plain_seconds and round(passed.plain_seconds, 6),
    }

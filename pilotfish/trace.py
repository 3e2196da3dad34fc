"""Traces: what each pass did for each request, as one JSON object a line: the draft, p, q, the coins, what was kept.

It does not know how verdicts are reached (`pilotfish.decoding.hearing` listens to that) nor who reads a trace. The one
trick: it hangs itself on `Engine.witness`, so whatever drives an engine (the command line, the bench, the server) can
be traced, and nothing of it exists where nobody asked.

Numbers are as the rule met them, in full; a record recomputes its own verdict. Tokens are [id, text], written as in
log-probabilities. What does not apply is left out.

    {"request": "1", "pass": 7, "num_prompt": 21, "num_output": 9, "temperature": 0.8,
     "tokens": [" of", " the"], "pieces": [" of", " the"], "num_accepted": 1,   emitted; the text that became final
     "draft": {"method": "ngram", "tokens": [" of", " a"], "parents": [-1, 0], "accepted": [true, false]},  or null
     "ids": [282, 260], "finish": null, "num_allowed": 4,     K: the most nodes this draft could have
     "rule": "rejection", "seed": 1, "position": 28,          of the noise; index in the text of the first token
     "drawn": false, "nodes": [{"id": 282, "p": 0.83, "q": 1.0}, ...],
     "trials": [{"node": 0, "passed": true, "left": 0.83, "threshold": 0.83, "u": 0.21}, ...],     `Trial`
     "rows": [{"after": -1, "top": [[282, " of", 0.83], ...]}, ...],                                `Row`
     "last": {"token": [260, " the"], "kind": "residual", "p": 0.4, "u": 0.3, "low": 0.1, "high": 0.6, "top": ...}}
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from .decoding.hearing import Hearing, Top
from .engine.engine import Engine, Event, Guess
from .errors import OptionError, PilotfishError
from .models.words import Spelling

Json = dict[str, Any]


class Emitted(Protocol):
    """What a pass gave; fields as in `Event`."""

    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def pieces(self) -> tuple[str, ...]: ...
    @property
    def num_accepted(self) -> int: ...


def seen(emitted: Emitted, guess: Guess | None, spelling: Spelling) -> Json:
    """What is seen of a pass from outside: the tokens it gave, and the draft with what became of it."""
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
    }


def record(event: Event, spelling: Spelling) -> Json:
    """The whole of it. The event must have been witnessed."""
    request, hearing = event.request, event.hearing
    assert hearing is not None, "nobody listened"
    return {
        "request": request.id,
        "pass": request.stats.num_steps,
        "num_prompt": request.num_prompt,
        "num_output": request.num_output,
        "temperature": request.params.temperature,
        **seen(event, event.guess, spelling),
        "ids": event.tokens,
        "finish": event.finish and str(event.finish),
        "num_allowed": event.num_allowed,
        **_heard(hearing, event.guess.tokens if event.guess else (), spelling),
    }


def _heard(hearing: Hearing, drafted: tuple[int, ...], spelling: Spelling) -> Json:
    assert len(drafted) == len(hearing.p)
    numbers = zip(drafted, hearing.p, hearing.q, strict=True)
    return {
        "rule": hearing.rule,
        "seed": hearing.seed,
        "position": hearing.position,
        "drawn": hearing.drawn,
        "nodes": [{"id": id, "p": _number(p), "q": _number(q)} for id, p, q in numbers],
        "trials": [_present(trial, spelling) for trial in hearing.trials],
        "rows": [_present(row, spelling) for row in hearing.rows],
        "last": _present(hearing.last, spelling),
        "path": hearing.path,
    }


def _present(part: Any, spelling: Spelling) -> Json:
    """The fields that are not None; ids get their text."""
    values = {spec.name: getattr(part, spec.name) for spec in fields(part)}
    return {name: _value(name, value, spelling) for name, value in values.items() if value is not None}


def _value(name: str, value: Any, spelling: Spelling) -> Any:
    if name == "top":
        top: Top = value
        return [(id, spelling.spell(id)[0], _number(p)) for id, p in top]
    if name in ("token", "choice"):
        return value, spelling.spell(value)[0]
    return _number(value) if isinstance(value, float) else value


def _number(value: float) -> float | None:
    """JSON has no NaN and no infinity; the first comes from a model that is broken there."""
    return value if math.isfinite(value) else None


Take = Callable[[Json], None]


def listen(engine: Engine, tokenizer: Any, take: Take) -> None:
    """From now on, each pass that gives a request tokens gives ``take`` a record."""
    spelling = Spelling(tokenizer)

    def witness(event: Event) -> None:
        if event.hearing is not None:
            take(record(event, spelling))

    engine.witness = witness


class TraceFile:
    """A file of records, one a line; a context manager. append: after what is there.

    Raises OptionError if it cannot be opened, PilotfishError when a record cannot be written.
    """

    def __init__(self, path: str | Path, *, append: bool = False):
        self.path = Path(path).expanduser()
        try:
            # By lines: whoever looks at it meanwhile sees whole records.
            self._file = self.path.open("a" if append else "w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise OptionError(f"the trace cannot be written to {str(path)!r}: {error.strerror}") from error

    def write(self, one: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(one, ensure_ascii=False, allow_nan=False) + "\n")
        except OSError as error:
            raise PilotfishError(f"the trace cannot be written to {str(self.path)!r}: {error.strerror}") from error

    def __enter__(self) -> "TraceFile":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self._file.close()
        except OSError as error:
            if kind is None:  # else `write` has said it already: closing tries what is left once more
                raise PilotfishError(f"the trace cannot be written to {str(self.path)!r}: {error.strerror}") from error

"""Structured output: what a text must look like, and which tokens may come next on each branch of a draft.

It does not know any grammar library (`pilotfish.models.grammars` does). The one trick: there is one matcher per
request, always in the state after the emitted text. A draft is walked as a tree by a copy of it, with take and undo, so
every row is masked by the state after its own path, and nothing that a draft does can harm the request.

Why it is exact: row by row, the law is the model's with the forbidden ids taken out before anything is drawn. That is
the law of plain constrained decoding, and drafts are judged against it. What drafters draw they draw without looking
at the grammar; a forbidden token has p = 0 and is rejected, and the residual does the rest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import OptionError, PilotfishError
from ..lazily import torch
from .draft import Draft

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What a text must look like; names as in vLLM. Exactly one of the first five is given.

    json: a JSON schema, as a mapping or as text. grammar: Lark, as llguidance reads it, or GBNF. whitespace_pattern:
    a regex for what may stand between JSON's tokens; by default at most `WHITESPACE` characters.

    Raises OptionError for none of them, several of them, or one of the wrong type.
    """

    json: Mapping[str, Any] | bool | str | None = field(
        default=None, metadata={"flag": "guided_json", "help": "the text must be JSON of this schema"}
    )
    json_object: bool = field(
        default=False, metadata={"flag": "guided_json_object", "help": "the text must be a JSON object"}
    )
    regex: str | None = field(
        default=None, metadata={"flag": "guided_regex", "help": "the whole text must match this regex"}
    )
    choice: tuple[str, ...] | list[str] | None = field(
        default=None, metadata={"flag": "guided_choice", "help": "the text must be one of these"}
    )
    grammar: str | None = field(
        default=None, metadata={"flag": "guided_grammar", "help": "the text must follow this Lark or GBNF grammar"}
    )
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            found = f", not {' and '.join(given)}" if given else ""
            raise OptionError(f"structured_outputs must have exactly one of {', '.join(KINDS)}{found}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise OptionError(f"structured_outputs: {name} must be a text, not {value!r}")
        if not isinstance(self.json_object, bool):
            raise OptionError(f"structured_outputs: json_object must be True or False, not {self.json_object!r}")
        if self.whitespace_pattern is not None and not given[0].startswith("json"):
            raise OptionError(f"structured_outputs: whitespace_pattern is for JSON, not for {given[0]}")
        if self.choice is not None:
            several = not isinstance(self.choice, str) and isinstance(self.choice, Sequence)
            if not several or not self.choice or not all(isinstance(text, str) for text in self.choice):
                raise OptionError(f"structured_outputs: choice must be a list of texts, not {self.choice!r}")
            object.__setattr__(self, "choice", tuple(self.choice))
        if self.json is not None:
            object.__setattr__(self, "json", _as_schema(self.json))  # so that equal ones are equal, and hashable

    @property
    def kind(self) -> str:
        """Which of the five was given."""
        return self._given()[0]

    def _given(self) -> list[str]:
        absent = {"json_object": False}
        return [name for name in KINDS if getattr(self, name) is not absent.get(name)]


def _as_schema(schema: object) -> str:
    """A schema as JSON text."""
    if not isinstance(schema, (Mapping, bool, str)):
        raise OptionError(f"structured_outputs: json must be a JSON schema, not {schema!r}")
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(parsed, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"structured_outputs: json is no JSON schema: {error}") from error
    if not isinstance(parsed, (Mapping, bool)):
        raise OptionError(f"structured_outputs: json must be a JSON schema, an object, not {parsed!r}")
    return text


class Matcher(Protocol):
    """A grammar's state behind a text. Ends of text are not its business. Raises PilotfishError, from any method, if
    the grammar grows beyond its limits."""

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""

    def allowed(self) -> Tensor:
        """The ids whose text may come next: bool [V], the caller's own."""

    def take(self, token: int) -> bool:
        """Go on behind a token; False, and nothing changed, if it may not come next."""

    def undo(self) -> None:
        """Go back to before the last token that was taken."""

    def copy(self) -> Matcher:
        """Another one in the same state."""


class Constraint:
    """A matcher bound to one request. stop_ids: what ends the text; they may come where the grammar accepts."""

    def __init__(self, matcher: Matcher, stop_ids: Set[int]):
        self.matcher, self.stop_ids = matcher, sorted(stop_ids)
        self._row_V: Tensor | None = None  # of the pending token, once asked for

    def advance(self, token: int) -> bool:
        """The token was emitted. Returns whether nothing but the end can follow. Raises PilotfishError as `Matcher`."""
        self._row_V = None
        if not self.matcher.take(token):
            raise PilotfishError(f"token {token} was allowed, and now the grammar does not take it")
        return self.matcher.accepting and not bool(self._text_row().any())

    def masks(self, draft: Draft) -> Tensor:
        """What may come after the pending token and after each node: bool [len(draft) + 1, V].

        Rows behind what the grammar forbids are never reached; there, and behind an end, everything is allowed. Where
        the grammar grows beyond its limits on the way, nothing is: there the draft is cut, and the next pass will see.
        Raises PilotfishError if it does so at the pending token.
        """
        row_V = self._with_ends(self._text_row(), self.matcher)
        if not len(draft):
            return row_V[None]
        rows_NV = row_V.new_ones((len(draft) + 1, len(row_V)))
        rows_NV[0] = row_V
        unseen = set(range(len(draft)))

        def visit(node: int, matcher: Matcher | None) -> None:
            if matcher is not None:
                text_V = matcher.allowed()
                # Nothing to say next: the request has ended with this node, if it gets that far.
                if bool(text_V.any()) or not matcher.accepting:
                    rows_NV[node + 1] = self._with_ends(text_V, matcher)
            unseen.discard(node)

        if not self._walk(draft, visit):
            rows_NV[[node + 1 for node in unseen]] = False
        return rows_NV

    def cut(self, draft: Draft) -> Draft:
        """The draft without the nodes that the grammar forbids, and without what follows them or an end.

        Drawn tokens stay as they are: to drop one for what it is would bias what is emitted.
        """
        if draft.probs is not None or not len(draft):
            return draft
        kept: list[int] = []
        self._walk(draft, lambda node, _matcher: kept.append(node))
        if len(kept) == len(draft):
            return draft
        kept.sort()
        places = {-1: -1} | {node: place for place, node in enumerate(kept)}
        return Draft(
            tuple(draft.tokens[node] for node in kept),
            tuple(places[draft.parents[node]] for node in kept),
            None,
            draft.kind,
            None if draft.chances is None else tuple(draft.chances[node] for node in kept),
        )

    def _walk(self, draft: Draft, visit: Callable[[int, Matcher | None], None]) -> bool:
        """Call visit(node, matcher in the state after it) for each node that may be emitted; None: it ends the text.
        Returns whether the grammar kept to its limits; if not, some nodes were not visited."""
        children, matcher = draft.children(), self.matcher.copy()

        def descend(parent: int) -> None:
            for node in children[parent]:
                if draft.tokens[node] in self.stop_ids:
                    if matcher.accepting:
                        visit(node, None)
                elif matcher.take(draft.tokens[node]):
                    visit(node, matcher)
                    descend(node)
                    matcher.undo()

        try:
            descend(-1)
        except PilotfishError:
            return False
        return True

    def _text_row(self) -> Tensor:
        if self._row_V is None:
            self._row_V = self.matcher.allowed()
        return self._row_V

    def _with_ends(self, text_V: Tensor, matcher: Matcher) -> Tensor:
        if not matcher.accepting or not self.stop_ids:
            return text_V
        row_V = text_V.clone()
        row_V[torch.tensor(self.stop_ids)] = True
        return row_V

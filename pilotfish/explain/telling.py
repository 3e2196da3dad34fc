"""Telling: a trace record in plain words, and its tree laid out line by line.

It does not know terminals or pages; both show what is said here. The one trick: a tree is drawn like a folder listing.
Only where the text may go on in several ways is it indented, so a chain is a straight line and fits on a telephone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Record = Mapping[str, Any]
Fate = Literal["root", "kept", "dropped", "unseen", "own"]

METHOD = (
    "A language model gives one token per pass. Here a cheap drafter guesses the next tokens, and the target model "
    "looks at all guesses in one pass, which costs little more than one token. That pass tells p, the target's own "
    "probabilities, behind each guess. Guesses that stand are tokens without a pass of their own; the first place "
    "where none stands gets a token of the target's own."
)
_RULES = {
    "greedy": (
        "At temperature 0 the target says its likeliest token. A guess is kept if it is that token, so the text is the "
        "target's own, word for word."
    ),
    "rejection": (
        "A guess was drawn by the drafter's law q (q is 1 if it was picked, not drawn). A uniform number u in [0, 1) "
        "decides: it is kept if u < p/q. If it is dropped, the next one to be tried is held against what is left, p "
        "minus q with nothing below 0, scaled to 1; and if none stands, a token is drawn from that rest. Kept or "
        "replaced, a token comes out exactly as often as p says."
    ),
    "block": (
        "The chain of guesses is judged as a whole: w is the joint ratio p/q of all guesses so far, cut at 1. Each "
        "place has its own number u, and the last place where u is small enough counts, even if one before it failed. "
        "On average no fewer guesses are kept than if each were judged alone, and the law of the text is still p."
    ),
    "coupled": (
        "A request with a seed has fixed noise, one number for each token at each place. The target says the token "
        "whose p, divided by its noise, is largest: a draw from p that the seed fixes. A guess is kept if it is that "
        "token, so the text depends on model and seed alone; a drafter that uses the same noise only guesses better."
    ),
}
_LONGEST = 18  # letters of a token that are shown


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a pass's tree. parent: that line's index; -1 for the first. column: how far it is indented.

    numbers: as they were compared. why: what became of it, in words. bar: 0 to 1, the part of all u that would keep it
    (or p, where there is no u); mark: u itself.
    """

    text: str
    parent: int
    column: int
    fate: Fate
    numbers: str = ""
    why: str = ""
    bar: float | None = None
    mark: float | None = None


@dataclass(frozen=True, slots=True)
class Totals:
    """Of some records together."""

    num_tokens: int
    num_passes: int
    num_drafted: int
    num_kept: int

    @property
    def tokens_per_pass(self) -> float:
        return self.num_tokens / max(1, self.num_passes)


def totals(records: Sequence[Record]) -> Totals:
    """Tokens gained against passes spent. A kept guess behind the end of the text does not count."""
    drafted = sum(len(one["nodes"]) for one in records)
    kept = sum(one["num_accepted"] for one in records)
    return Totals(sum(len(one["ids"]) for one in records), len(records), drafted, kept)


def rule_in_words(rule: str) -> str:
    """How this rule decides."""
    return _RULES[rule]


def shown(word: str) -> str:
    """A token with its spaces and ends of lines made visible."""
    word = word.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍").replace(" ", "·")
    return word if len(word) <= _LONGEST else f"{word[: _LONGEST - 1]}…"


def number(value: float | None) -> str:
    """Three digits behind the point, and no false nought: less than a thousandth is written to its first digit."""
    if value is None:
        return "?"
    if 0 < value < 0.001:
        return f"{value:.1g}"
    return "1" if value == 1 else f"{value:.3f}" if value < 100 else f"{value:.0f}"


# -- what a pass began and ended with -------------------------------------------------------------------------------


def beginning(one: Record) -> str:
    """Who guessed, and how many."""
    draft, most = one["draft"], one["num_allowed"]
    if draft is None:
        if one["pass"] == 1:
            return "The first pass reads the prompt. Nothing is guessed before it."
        return "No guesses were allowed (K is 0 here)." if most == 0 else "The drafter had no guess."
    num = len(draft["tokens"])
    how = "drawn from its law q" if one["drawn"] else "picked"
    return f"{draft['method']} guessed {num} of at most {most} token{'s' * (most != 1)}, {how}."


def ending(one: Record) -> str:
    """Where the last token came from."""
    last = one["last"]
    word, coin = f"“{shown(last['token'][1])}”", _slice(last)
    if last["kind"] == "plain":
        return f"The target says {word} (p {number(last['p'])}){coin}, as in plain decoding."
    if last["kind"] == "bonus":
        return (
            f"Every guess on the way was kept, and the target's law behind the last one is known already: {word} comes "
            f"with it, a bonus (p {number(last['p'])}){coin}."
        )
    if last["kind"] == "choice":
        return f"There the target says {word} (p {number(last['p'])}), which was not among the guesses."
    return f"In the place of what was dropped, a token from the rest of p: {word}{coin}."


def _slice(last: Mapping[str, Any]) -> str:
    if "u" not in last:
        return ""
    return f": u {number(last['u'])} falls in its slice, {number(last['low'])} to {number(last['high'])}"


def gain(one: Record) -> str:
    """What the pass brought."""
    kept, given, judged = one["num_accepted"], len(one["ids"]), len(one["path"])
    if given < judged + 1:
        return f"The text ends inside this run ({one['finish']}): {_tokens(given)} count, the rest is thrown away."
    made = f"{kept} kept + 1 of the target's own = {_tokens(given)} for one pass" if kept else "1 token for one pass"
    return f"{made}." if kept or not one["nodes"] else f"{made}: as without guesses, but no worse."


def balance(records: Sequence[Record]) -> str:
    """Tokens so far against passes so far."""
    sums = totals(records)
    passes = "1 pass" if sums.num_passes == 1 else f"{sums.num_passes} passes"
    return f"So far {_tokens(sums.num_tokens)} in {passes}; plain decoding takes {sums.num_tokens}."


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


# -- the tree ---------------------------------------------------------------------------------------------------------


def lines(one: Record) -> list[Line]:
    """The text so far, the guesses behind it, and the last token where it belongs, parents first."""
    tokens = one["draft"]["tokens"] if one["draft"] else []
    parents = list(one["draft"]["parents"]) if one["draft"] else []
    trials = {trial["node"]: trial for trial in one["trials"]}
    own = len(tokens)  # the last token, as one more node behind the accepted path
    children: dict[int, list[int]] = {}
    for node, parent in enumerate([*parents, one["path"][-1] if one["path"] else -1]):
        children.setdefault(parent, []).append(node)
    found = [Line("the text so far", -1, 0, "root")]
    waiting = [(node, 0, int(len(children[-1]) > 1)) for node in reversed(children[-1])]
    while waiting:
        node, parent, column = waiting.pop()
        if node == own:
            found.append(_own(one, parent, column))
        else:
            found.append(_line(one, node, tokens[node], trials.get(node), parent, column))
        below, at = children.get(node, []) if node != own else [], len(found) - 1
        waiting += [(child, at, column + (len(below) > 1)) for child in reversed(below)]
    return found


def _own(one: Record, parent: int, column: int) -> Line:
    last = one["last"]
    names = {
        "plain": "the target's own",
        "bonus": "the bonus",
        "residual": "from the rest of p",
        "choice": "the target's own",
    }
    thrown = len(one["ids"]) < len(one["path"]) + 1
    why = "behind the end of the text" if thrown else names[last["kind"]]
    return Line(shown(last["token"][1]), parent, column, "own", f"p {number(last['p'])}", why)


def _line(one: Record, node: int, word: str, trial: Mapping[str, Any] | None, parent: int, column: int) -> Line:
    about, fate = one["nodes"][node], "kept" if node in one["path"] else "dropped"
    p, q = about["p"], about["q"]
    pq = f"p {number(p)}, q {number(q)}" if one["drawn"] and one["rule"] in ("rejection", "block") else f"p {number(p)}"
    if trial is None:
        return Line(shown(word), parent, column, "unseen", pq, "not looked at", p)
    if one["rule"] in ("greedy", "coupled"):
        numbers, why = pq, "the target agrees" if trial["passed"] else "target says another"
        if "score" in trial:
            numbers += f", p/noise {number(trial['score'])}"
            why = "the best score" if trial["passed"] else f"best is {number(_best(one, node))}"
        return Line(shown(word), parent, column, _fate(fate), numbers, why, p)
    if one["rule"] == "block":
        numbers = f"{pq}, w {number(trial['weight'])}"
    else:
        numbers = (
            pq if _is_first(one, node) else f"left {number(trial['left'])}{pq[pq.find(',') :] if one['drawn'] else ''}"
        )
    return Line(
        shown(word),
        parent,
        column,
        _fate(fate),
        numbers,
        _coin(one, node, trial),
        min(1.0, trial["threshold"]),
        trial.get("u"),
    )


def _is_first(one: Record, node: int) -> bool:
    """Whether it is the first sibling, which meets p itself."""
    parents = one["draft"]["parents"]
    return list(parents).index(parents[node]) == node


def _coin(one: Record, node: int, trial: Mapping[str, Any]) -> str:
    if "u" not in trial:
        return "nothing is left"
    sign = "<" if trial["passed"] else "≥"
    name = "h " if one["rule"] == "block" else "" if not _is_first(one, node) else "p/q " if one["drawn"] else "p "
    return f"u {number(trial['u'])} {sign} {name}{number(trial['threshold'])}"


def _best(one: Record, node: int) -> float | None:
    """The winner's score in the row that this node was held against."""
    parent = one["draft"]["parents"][node]
    return next((row["score"] for row in one["rows"] if row["after"] == parent), None)


def _fate(word: str) -> Fate:
    return "kept" if word == "kept" else "dropped"

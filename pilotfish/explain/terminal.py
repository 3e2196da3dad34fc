"""The trace as a story in the terminal: a short tree per pass, and a sentence before and after it.

It does not know engines. The one trick: what is said comes from `telling`, so the page and the terminal cannot tell two
stories.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .telling import METHOD, Line, Record, balance, beginning, ending, gain, lines, number, rule_in_words, shown, totals

_STYLES = {"root": "dim", "kept": "green", "dropped": "red", "unseen": "dim", "own": "bold"}
_MARKS = {"root": " ", "kept": "✓", "dropped": "✗", "unseen": "·", "own": "●"}


class Story:
    """Prints records as they come."""

    def __init__(self, console: Console):
        self.console, self.records = console, list[Record]()

    def tell(self, one: Record) -> None:
        """One pass."""
        if not self.records:
            self.console.print(f"{METHOD}\n\n{rule_in_words(one['rule'])}", highlight=False)
            self.console.print("[dim]✓ kept   ✗ dropped   · not looked at   ● the target's own token[/]")
        self.records.append(one)
        self.console.print(f"\n[bold]Pass {one['pass']}[/]  {escape(beginning(one))}", highlight=False)
        if one["nodes"]:
            self.console.print(Padding(_tree(lines(one)), (0, 0, 0, 2)))
        self.console.print(f"  {escape(ending(one))}", highlight=False)
        if one["last"]["kind"] == "residual":
            rest = ", ".join(f"{shown(word)} {number(p)}" for _, word, p in one["last"]["top"])
            self.console.print(f"  [dim]The rest of p: {escape(rest)}[/]", highlight=False)
        self.console.print(f"  {escape(gain(one))} {escape(balance(self.records))}", highlight=False)

    def end(self, text: str) -> None:
        """The text, with kept guesses in colour, and the sums."""
        whole = Text()
        for one in self.records:
            for index, piece in enumerate(one["pieces"]):
                whole.append(piece, "green underline" if index < one["num_accepted"] else "")
        self.console.rule("the text: underlined tokens were guessed and kept")
        self.console.print(whole if whole.plain == text else Text(text))
        self.console.print(f"\n{summary(self.records)}", highlight=False)


def summary(records: Sequence[Record]) -> str:
    """One line about the whole."""
    sums = totals(records)
    share = f", {sums.num_kept / sums.num_drafted:.0%} of them kept" if sums.num_drafted else ""
    return (
        f"{sums.num_tokens} tokens in {sums.num_passes} passes, {sums.tokens_per_pass:.2f} a pass; "
        f"{sums.num_drafted} guesses{share}."
    )


def _tree(found: Sequence[Line]) -> Table:
    table = Table.grid(padding=(0, 2))
    for line in found:
        style = _STYLES[line.fate]
        name = Text(f"{'  ' * line.column}{_MARKS[line.fate]} {line.text}", style, no_wrap=True)
        table.add_row(name, Text(line.numbers, "dim"), Text(line.why, style))
    return table

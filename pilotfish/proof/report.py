"""Check and Report: what was looked at and what came out, as a table for people and a line of JSON for programs."""

import json
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

_FEW_DRAFTED, _FEW_ACCEPTED = 100, 30  # below these, checks that passed tell little about a method


@dataclass(frozen=True, slots=True)
class Check:
    """One check. passed compares ``statistic`` with ``threshold`` in the sense that ``detail`` tells.

    meaning: what it would mean if this check failed.
    """

    name: str
    passed: bool
    statistic: float
    threshold: float
    detail: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Report:
    """The verdict. target and method: as in the start-up line. num_near_ties: divergences that rounding explains.
    texts_only: laws were not looked at. num_drafted, num_accepted: tokens, by the method itself in all checks."""

    target: str
    method: str
    checks: tuple[Check, ...]
    num_near_ties: int = 0
    seconds: float = 0.0
    texts_only: bool = False
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def lossless(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def verdict(self) -> str:
        """One or more sentences."""
        if self.lossless:
            ties = "" if not self.num_near_ties else (
                f" {self.num_near_ties} differences are near-ties: two tokens whose scores differ by less than the "
                "rounding of this number format, which depends on the shape of a pass.")  # fmt: skip
            scope = " Texts alone were compared; the laws of what is drawn were left out." if self.texts_only else ""
            return f"lossless: all {len(self.checks)} checks passed.{scope}{ties}\n{self._weight}"
        failed = [check for check in self.checks if not check.passed]
        lines = [f"NOT proven lossless: {len(failed)} of {len(self.checks)} checks failed."]
        return "\n".join([*lines, *(f"  {check.name}: {check.meaning} ({check.detail})" for check in failed)])

    @property
    def _weight(self) -> str:
        """How much the method had to do with it."""
        more = "prompts on which it drafts more (--prompts, --limit, --max-tokens)"
        if not self.num_drafted:
            told = "The method itself drafted nothing: what is proven is the engine and its rules"
            return f"{told}; give --method if there was none, or {more}."
        few = self.num_drafted < _FEW_DRAFTED or self.num_accepted < _FEW_ACCEPTED
        told = f"The method itself drafted {self.num_drafted} tokens, {self.num_accepted} of them accepted"
        return f"{told}: with so few, this proves little about it; give {more}." if few else f"{told}."

    def as_json(self) -> str:
        """One line."""
        checks = [
            {
                "name": check.name,
                "passed": check.passed,
                "statistic": check.statistic,
                "threshold": check.threshold,
                "detail": check.detail,
            }
            for check in self.checks
        ]
        return json.dumps(
            {
                "lossless": self.lossless,
                "texts_only": self.texts_only,
                "target": self.target,
                "method": self.method,
                "num_near_ties": self.num_near_ties,
                "num_drafted": self.num_drafted,
                "num_accepted": self.num_accepted,
                "seconds": round(self.seconds, 1),
                "checks": checks,
            }
        )


def print_report(report: Report, console: Console | None = None, *, as_json: bool = False) -> None:
    """A table and the verdict in words; then the JSON as the last line of stdout, unless that is a terminal.

    as_json: the JSON alone, wherever it goes.
    """
    console = console or Console()
    if not as_json:
        _print_table(report, console)
    if as_json or not console.file.isatty():
        print(report.as_json(), file=console.file, flush=True)


def _print_table(report: Report, console: Console) -> None:
    table = Table(title=f"{report.target} | {report.method}", title_justify="left")
    table.add_column("check")
    table.add_column("passed")
    table.add_column("statistic", justify="right")
    table.add_column("threshold", justify="right")
    table.add_column("detail", overflow="fold")
    for check in report.checks:
        mark = "[green]yes[/]" if check.passed else "[bold red]NO[/]"
        table.add_row(check.name, mark, f"{check.statistic:.3g}", f"{check.threshold:.3g}", check.detail)
    console.print(table)
    console.print(report.verdict, markup=False, highlight=False, style="green" if report.lossless else "bold red")

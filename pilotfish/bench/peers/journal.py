"""What was measured, a JSON object a line, written as it happens: the record of a run and the way to go on with it.

It does not know how anything is measured. The one trick: failures are not written, so a run that goes on tries again
what failed and repeats nothing that did not.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...errors import OptionError


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt with one variant of one engine.

    bursts: (seconds since the request, tokens that came at once). ids: the new tokens. peak_bytes: of the process.
    idle_cpu: processor time of all waiting workers over this run's time.
    """

    prompt: int
    category: str
    engine: str
    weights: str
    variant: str
    bursts: tuple[tuple[float, int], ...]
    ids: tuple[int, ...]
    peak_bytes: int
    idle_cpu: float = 0.0

    @property
    def key(self) -> tuple[str, str, str]:
        return self.engine, self.weights, self.variant

    @property
    def first_token_seconds(self) -> float | None:
        return self.bursts[0][0] if self.bursts else None

    @property
    def rate(self) -> float | None:
        """Tokens after the first burst over the seconds after it; None if there were none."""
        num_tokens = sum(count for _, count in self.bursts[1:])
        return num_tokens / (self.bursts[-1][0] - self.bursts[0][0]) if num_tokens else None


@dataclass(frozen=True, slots=True)
class Load:
    """A worker that was loaded."""

    engine: str
    weights: str
    variants: tuple[str, ...]
    seconds: float
    peak_bytes: int
    version: str
    precision: str


class Journal:
    """Raises OptionError if the file holds another run's results. header: what two runs must share to be one."""

    def __init__(self, path: Path, header: Mapping[str, Any], fresh: bool):
        self.path = path
        self.runs: list[Run] = []
        self.loads: list[Load] = []
        if path.exists() and not fresh:
            self._read(header)
        else:
            path.write_text(json.dumps({"header": header}) + "\n", encoding="utf-8")

    def _read(self, header: Mapping[str, Any]) -> None:
        lines = self.path.read_text(encoding="utf-8").split("\n")
        if lines[-1]:  # the last line was cut short
            lines[-1] = ""
            self.path.write_text("\n".join(lines), encoding="utf-8")
        try:
            entries = [json.loads(line) for line in lines if line]
            found = entries.pop(0)["header"]
        except (ValueError, LookupError, TypeError) as error:
            raise OptionError(
                f"{self.path} is no record of runs: remove it, name another out, or ask for fresh"
            ) from error
        for name, value in json.loads(json.dumps(header)).items():
            if found.get(name) != value:
                raise OptionError(
                    f"{self.path} holds a run with {name} {found.get(name)!r}, not {value!r}: "
                    "ask for fresh to replace it, or name another out"
                )
        for entry in entries:
            if "run" in entry:
                values = entry["run"]
                values["bursts"] = tuple((seconds, count) for seconds, count in values["bursts"])
                self.runs.append(Run(**values | {"ids": tuple(values["ids"])}))
            else:
                self.loads.append(Load(**entry["load"] | {"variants": tuple(entry["load"]["variants"])}))

    def add(self, entry: Run | Load) -> None:
        """Remember and write down."""
        if isinstance(entry, Run):
            self.runs.append(entry)
        else:
            self.loads.append(entry)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({type(entry).__name__.lower(): asdict(entry)}) + "\n")

    def done(self) -> set[tuple[int, str, str, str]]:
        """(prompt, engine, weights, variant) of all runs."""
        return {(run.prompt, *run.key) for run in self.runs}

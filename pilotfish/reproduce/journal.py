"""What was measured, a JSON object a line, written as it comes: the record of the report, and how a run goes on.

It does not know what the values mean. The one trick: a key says all that a value depends on, so what has a value is not
measured again, and nothing else has to be compared.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import OptionError


class Journal:
    """values: {key: value}, in the order written. Raises OptionError for a file that is no such record."""

    def __init__(self, path: Path):
        self.path = path
        self.values: dict[str, Any] = {}
        if not path.exists():
            return
        lines = path.read_text(encoding="utf-8").split("\n")
        if lines[-1]:  # cut short by a kill
            lines[-1] = ""
            path.write_text("\n".join(lines), encoding="utf-8")
        try:
            for line in filter(None, lines):
                entry = json.loads(line)
                self.values[entry["key"]] = entry["value"]
        except (ValueError, LookupError, TypeError) as error:
            raise OptionError(f"{path} is no record of measurements: remove it, or name another out") from error

    def once(self, key: str, measure: Callable[[], Any]) -> Any:
        """The value of this key, measured and written down if there is none."""
        if key not in self.values:
            value = json.loads(json.dumps(measure()))  # as it will be read again
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "value": value}) + "\n")
            self.values[key] = value
        return self.values[key]

"""Each engine's own virtual environment: made once from a file of pins, kept until the pins change.

It does not know engines. The one trick: the pins are complete and installed without looking at dependencies, so what
is installed is what is written down, and a resolver's taste cannot change a result.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ...errors import PilotfishError

REQUIREMENTS = Path(__file__).parent / "requirements"
_STAMP = ".installed"


class InstallError(PilotfishError):
    """An engine could not be installed; the message names the log."""


def interpreter(
    folder: Path, requirements: str, build: Mapping[str, str], pip_flags: str, say: Callable[[str], None]
) -> Path:
    """The Python of an environment in ``folder`` that has these requirements; installs them if it does not.

    Raises InstallError.
    """
    pins = (REQUIREMENTS / requirements).read_bytes()
    wanted = hashlib.sha256(pins + sys.version.encode()).hexdigest()
    python = folder / "bin" / "python"
    stamp = folder / _STAMP
    if stamp.is_file() and stamp.read_text(encoding="utf-8").strip() == wanted and python.exists():
        return python
    log = folder.with_name(folder.name + ".log")
    say(f"installing {requirements} into {folder} (log: {log})")
    start = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--no-deps"]
    with log.open("wb") as output:
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [*pip, *shlex.split(pip_flags), "-r", str(REQUIREMENTS / requirements)],
        ):
            status = subprocess.run(command, stdout=output, stderr=output, env=os.environ | dict(build)).returncode
            if status != 0:
                raise InstallError(f"{requirements} could not be installed (status {status}); the log is {log}")
    stamp.write_text(wanted + "\n", encoding="utf-8")
    say(f"installed {requirements} in {time.monotonic() - start:.0f} s")
    return python

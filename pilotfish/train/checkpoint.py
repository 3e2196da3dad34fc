"""A checkpoint: one file with all that a run needs to go on as if it had not stopped.

It does not know what is trained. The one trick: it is written beside the old one and takes its place when it is whole.
"""

import os
from pathlib import Path
from typing import Any

import torch

from ..errors import OptionError


def save(path: Path, content: dict[str, Any]) -> None:
    """Raises OSError (a full disk, say), and then the old file is untouched."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            try:
                torch.save(content, file)
            except RuntimeError as error:  # torch wraps what the file raised
                raise OSError(getattr(error.__context__, "errno", None) or 0, str(error).splitlines()[0]) from error
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load(path: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The content; None if there is no file. Raises OptionError if it cannot be read, or is of a run with other options
    (``identity``), naming the first that differs."""
    if not path.exists():
        return None
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        before = content["identity"]
    except Exception as error:  # a damaged file can make torch raise anything
        raise OptionError(f"{path} cannot be read ({type(error).__name__}); remove it to train anew") from error
    for name in sorted({*before, *identity}):
        if before.get(name) != identity.get(name):
            raise OptionError(
                f"{path} is of a run with {name} {before.get(name)!r}, not {identity.get(name)!r}; give that, or "
                "another folder, or remove the file to train anew"
            )
    return content

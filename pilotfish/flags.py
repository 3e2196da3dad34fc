"""Command-line flags from the fields of frozen dataclasses, so that an option is written down once, beside its owner.

It does not know any particular option. The one trick: a flag that was not given is absent, not a default, so the
dataclass's own default stays the only one.
"""

import dataclasses
import json
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from .errors import OptionError

Command = TypeVar("Command", bound=Callable[..., Any])
Kind = TypeVar("Kind")


def from_fields(
    *kinds: type, without: Iterable[str] = (), default: Mapping[str, object] | None = None
) -> Callable[[Command], Command]:
    """A decorator that adds a flag per field of these dataclasses that has a help text.

    A field's metadata may name its flag (``flag``), which is then the parameter's name too. default: shown instead of
    the field's own.
    """
    skipped = set(without)

    def decorate(command: Command) -> Command:
        for kind in reversed(kinds):
            hints = get_type_hints(kind)
            for spec in reversed(dataclasses.fields(kind)):
                if spec.name not in skipped and "help" in spec.metadata:
                    shown = (default or {}).get(spec.name, spec.default)
                    command = _option(spec, hints[spec.name], shown)(command)
                    skipped.add(spec.name)
        return command

    return decorate


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that the user gave. One that may be given several times is an empty tuple if it was not."""
    return {name: value for name, value in values.items() if value is not None and value != ()}


def pick(kind: type[Kind], values: Mapping[str, Any], **default: Any) -> Kind:
    """An instance of a dataclass from those of the values that are its fields."""
    names = {spec.name for spec in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{**default, **{name: value for name, value in given(values).items() if name in names}})


def read_json(text: str) -> dict[str, Any]:
    """A JSON object, or ``@FILE`` to read one from. Raises OptionError saying where it breaks."""
    source = "the speculative config"
    if text.startswith("@"):
        source = text[1:]
        try:
            text = Path(source).expanduser().read_text(encoding="utf-8")
        except OSError as error:
            raise OptionError(f"{source} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise OptionError(f"{source} is not a text in UTF-8: {error}") from error
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise OptionError(f"{source} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise OptionError(f'{source} must be a JSON object such as {{"method": "ngram"}}, not {text!r}')
    return value


def _number_or(words: list[str]) -> Callable[[str], int | str]:
    """Reads a whole number, or one of a few words."""

    def integer(text: str) -> int | str:
        if text in words:
            return text
        try:
            return int(text)
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a whole number or {' or '.join(words)}") from None

    return integer


def _option(spec: "dataclasses.Field[Any]", hint: Any, shown: object) -> Callable[[Command], Command]:
    name = str(spec.metadata.get("flag", spec.name))
    flag = name.replace("_", "-")
    text = str(spec.metadata["help"])
    kind, many = _type_of(hint)
    if many:
        text += "; may be given several times"
        shown = ", ".join(map(str, shown)) if isinstance(shown, (tuple, list)) else shown
    if shown is not None and shown is not dataclasses.MISSING:
        text += f"  [default: {str(shown).lower() if isinstance(shown, bool) else shown}]"
    if kind is bool:
        return click.option(f"--{flag}/--no-{flag}", name, default=None, help=text)
    return click.option(f"--{flag}", name, type=kind, multiple=many, default=None, help=text)


def _type_of(hint: Any) -> tuple[Any, bool]:
    """(click type, whether it may be given several times) of a field's annotation."""
    if get_origin(hint) in (Union, types.UnionType):
        words = [value for arm in get_args(hint) if get_origin(arm) is Literal for value in get_args(arm)]
        if words:
            return _number_or(words), False
        hint = next(arm for arm in get_args(hint) if arm is not type(None))
    if get_origin(hint) is Literal:
        return click.Choice([str(value) for value in get_args(hint)]), False
    if get_origin(hint) in (tuple, list):
        return _type_of(get_args(hint)[0])[0], True
    return (hint if hint in (int, float, bool, str) else str), False

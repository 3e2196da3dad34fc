"""Finds drafters by file name, and turns a speculative config into one.

It does not know any drafter. The one trick: the method is the module, its options are the fields of that module's
``Options``, so a new file needs no entry anywhere, and a misspelt key is met with the nearest real one.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from ..decoding.draft import MAX_NODES
from ..errors import DraftError, OptionError, unknown_name
from .base import Drafter, Setting

if TYPE_CHECKING:
    from ..decoding.verify import Rule

_NOT_METHODS = {"base", "drawing", "growing", "registry", "shapes", "states", "wording"}

# What other libraries call the same thing: (our key, and the method it implies).
ALIASES = {
    "assistant_model": ("model", "draft_model"),
    "num_assistant_tokens": ("num_speculative_tokens", None),
    "prompt_lookup_num_tokens": ("num_speculative_tokens", "ngram"),
    "max_matching_ngram_size": ("prompt_lookup_max", None),
}
_RULES: dict[str, Rule] = {"standard": "rejection", "rejection": "rejection", "block": "block"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions:
    """What every method has. Raises OptionError for values out of range."""

    num_speculative_tokens: int | Literal["auto"] = field(
        default="auto",
        metadata={"help": f"most drafted tokens a step, 0 to {MAX_NODES}, or auto: as many as pay, measured here"},
    )
    rejection_sample_method: str = field(default="standard", metadata={"help": "standard or block; both are exact"})

    def __post_init__(self) -> None:
        k = self.num_speculative_tokens
        if k != "auto" and (isinstance(k, bool) or not isinstance(k, int) or not 0 <= k <= MAX_NODES):
            raise OptionError(f"num_speculative_tokens must be a whole number from 0 to {MAX_NODES} or auto, not {k!r}")
        if not isinstance(self.rejection_sample_method, str) or self.rejection_sample_method not in _RULES:
            raise unknown_name("rejection_sample_method", str(self.rejection_sample_method), _RULES)

    @property
    def rule(self) -> Rule:
        return _RULES[self.rejection_sample_method]


@dataclass(frozen=True, slots=True)
class Speculation:
    """A parsed speculative config: which drafter, with which options."""

    method: str
    common: CommonOptions
    options: Any

    def build(self, setting: Setting) -> Drafter:
        found = drafter_class(self.method)
        if setting.target.encoder_decoder and not found.encoder_decoder:
            raise DraftError(
                f"method {self.method!r} is for decoder-only targets, and {setting.target.name} is an encoder-decoder "
                "model; try 'draft_model', 'ngram' or 'suffix'"
            )
        return found.build(self.options, setting)


def methods() -> list[str]:
    """Names of all methods: the files in this folder."""
    package = importlib.import_module(__package__)
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name not in _NOT_METHODS)


def drafter_class(method: str) -> type[Drafter]:
    """The drafter of a method. Raises OptionError for an unknown one, naming the nearest."""
    if method not in methods():
        raise unknown_name("method", method, methods())
    module = importlib.import_module(f"{__package__}.{method}")
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Drafter) and value.__module__ == module.__name__
    ]
    assert len(found) == 1, f"{module.__name__} must define exactly one Drafter"
    return found[0]


def method_of(drafter: Drafter) -> str:
    """The name of a drafter's method."""
    return type(drafter).__module__.rpartition(".")[2]


def parse(config: Mapping[str, Any] | None) -> Speculation:
    """Read a config with vLLM's keys (and Hugging Face's aliases). No config is method ``none``.

    Without ``method``, ``model`` means ``draft_model`` and ``prompt_lookup_*`` mean ``ngram``. Raises OptionError
    for unknown keys and bad values.
    """
    given = resolve_aliases(dict(config or {}))
    if odd := [key for key in given if not isinstance(key, str)]:
        raise OptionError(f"the keys of a speculative config are names, not {odd[0]!r}")
    method = given.pop("method", None) or _implied_method(given)
    if not isinstance(method, str):
        raise OptionError(f"method must be a name, not {method!r}")
    options_class = drafter_class(method).Options
    common = {f.name for f in fields(CommonOptions)}
    own = {f.name for f in fields(options_class)}
    for key in given:
        if key == "model" and key not in own:
            raise OptionError(f"method {method!r} takes no draft model; leave it out, or use method 'draft_model'")
        if key not in common | own:
            raise unknown_name(f"option for method {method!r}:", key, common | own)
    return Speculation(
        method,
        CommonOptions(**{key: value for key, value in given.items() if key in common}),
        options_class(**{key: value for key, value in given.items() if key in own}),
    )


def member(value: Any, where: str) -> Speculation:
    """A drafter inside a drafter, from a method's name or a config of its own (a mapping, or JSON).

    ``num_speculative_tokens`` in it bounds that drafter alone; unset, it is MAX_NODES. where: the option that holds it,
    for messages. Raises OptionError as `parse`, and for what concerns the whole.
    """
    if isinstance(value, str):
        value = _json(value, where) if value.lstrip().startswith("{") else {"method": value.strip()}
    if not isinstance(value, Mapping):
        raise OptionError(f"{where} must be a method's name or a config such as {{'method': 'ngram'}}, not {value!r}")
    config = resolve_aliases(dict(value))
    if "rejection_sample_method" in config:
        raise OptionError(f"rejection_sample_method is the target's, not a drafter's: it cannot be set in {where}")
    config.setdefault("num_speculative_tokens", MAX_NODES)
    if not isinstance(config["num_speculative_tokens"], int) or config["num_speculative_tokens"] < 1:
        raise OptionError(
            f"num_speculative_tokens in {where} must be a whole number from 1 to {MAX_NODES}, "
            f"not {config['num_speculative_tokens']!r}"
        )
    return parse(config)


def members(value: Any, where: str) -> tuple[Speculation, ...]:
    """Several of them: a sequence, a JSON list, or names with commas between."""
    if isinstance(value, str):
        value = _json(value, where) if value.lstrip().startswith(("[", "{")) else value.split(",")
    if isinstance(value, Mapping) or not isinstance(value, Sequence) or len(value) == 0:
        raise OptionError(f"{where} must be a list of methods, such as 'suffix,ngram', not {value!r}")
    return tuple(member(one, where) for one in value)


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise OptionError(f"{where} is not JSON: {error}") from error


def parse_each(names: Sequence[str], config: Mapping[str, Any]) -> list[Speculation]:
    """One speculation per method, each with the options it knows. Raises OptionError for one that none knows."""
    check_known(names, config)
    return [parse({**known_to(name, config), "method": name}) for name in names]


def check_known(names: Sequence[str], config: Mapping[str, Any]) -> None:
    """Raises OptionError for an option that none of these methods has."""
    known: dict[str, None] = {}
    for name in names:
        known |= dict.fromkeys([*known_to(name, config), "method"])
    for key in resolve_aliases(dict(config)):
        if key not in known:
            raise unknown_name(f"option for {', '.join(names)}:", key, known)


def known_to(method: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config that a method has options for: where one set of flags serves several methods."""
    names = {f.name for f in (*fields(CommonOptions), *fields(drafter_class(method).Options))}
    return {key: value for key, value in resolve_aliases(dict(config)).items() if key in names}


def keywords() -> dict[str, str]:
    """Every option of every method, as a keyword argument or flag: {its name there: its key in a config}.

    They differ where a name alone would be misread: ``draft_model`` is the config's ``model``.
    """
    found = {f.name: f.name for f in fields(CommonOptions)}
    for method in methods():
        found |= {f.metadata.get("flag", f.name): f.name for f in fields(drafter_class(method).Options)}
    return found


def resolve_aliases(given: dict[str, Any]) -> dict[str, Any]:
    """The same config in our own names, changed in place. Raises OptionError where one thing is given twice."""
    for alias, (key, method) in ALIASES.items():
        if alias in given:
            if key in given:
                raise OptionError(f"{alias!r} and {key!r} mean the same; give one")
            given[key] = given.pop(alias)
            if method:
                given.setdefault("method", method)
    return given


def _implied_method(given: Mapping[str, Any]) -> str:
    if given.get("model") is not None:
        return "draft_model"
    if any(key.startswith("prompt_lookup") for key in given):
        return "ngram"
    for key in given:  # perhaps it is a misspelt method that is missing
        if key not in keywords().values():
            raise unknown_name("option", key, {"method", *keywords().values()})
    if given:
        takers = [name for name in methods() if name != "none" and given.keys() <= known_to(name, given).keys()]
        raise OptionError(
            f"{', '.join(given)} without a method does nothing; a speculative config needs a method: one of "
            f"{', '.join(takers or methods())} (on the command line --method)"
        )
    return "none"

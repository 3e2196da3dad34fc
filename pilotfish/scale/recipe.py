"""Recipe: all that a replica needs to load the model for itself; and `read`, which makes one from a flat mapping.

It does not know Ray or the command line. The one trick: every option is checked here, where the user is, and not on a
machine whose log nobody reads.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ..drafters import registry
from ..engine.options import EngineOptions
from ..errors import OptionError, unknown_name
from ..llm import LLM
from ..models.options import LoadOptions
from ..server.options import ServeOptions
from .options import ScaleOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Raises OptionError for a speculative config that `LLM` would refuse before it has seen a model."""

    model: str = "demo"
    speculative_config: Mapping[str, Any] = field(default_factory=dict)
    load: LoadOptions = field(default_factory=LoadOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        registry.parse(self.speculative_config)

    @property
    def num_seats(self) -> int:
        """Completions that run at once in one engine."""
        return self.engine.max_num_seqs

    def make(self) -> LLM:
        """Load it. Raises as `LLM`."""
        options = asdict(self.load) | asdict(self.engine)
        return LLM(self.model, speculative_config=self.speculative_config, **options)


def read(args: Mapping[str, Any]) -> tuple[Recipe, ServeOptions, ScaleOptions]:
    """The same options as flags, as a mapping. Numbers may be texts: ``serve run`` knows nothing else.

    Raises OptionError for what is unknown or wrong, naming it.
    """
    kinds = (LoadOptions, EngineOptions, ServeOptions, ScaleOptions)
    owners = {spec.name: kind for kind in kinds for spec in fields(kind)}
    drafting = {"method": "method"} | registry.keywords()
    given: dict[type, dict[str, Any]] = {kind: {} for kind in kinds}
    config: dict[str, Any] = {}
    rest: dict[str, Any] = {"model": "demo"}
    for name, value in args.items():
        if name in ("host", "port"):
            raise OptionError(f"{name}: Serve listens, not we; it goes into its http_options")
        if name in owners:
            given[owners[name]][name] = _typed(name, get_type_hints(owners[name])[name], value)
        elif name in drafting:
            config[drafting[name]] = _number(value)
        elif name in ("model", "speculative_config"):
            rest[name] = value
        else:
            raise unknown_name("option", name, {*owners, *drafting, "model", "speculative_config"})
    if not isinstance(rest["model"], str) or not rest["model"]:
        raise OptionError(f"model must be a folder, a hub id, a GGUF file or demo, not {rest['model']!r}")
    whole = rest.get("speculative_config", {})
    if not isinstance(whole, Mapping):
        raise OptionError(f"speculative_config must be a mapping such as {{'method': 'ngram'}}, not {whole!r}")
    if twice := sorted(set(whole) & set(config)):
        raise OptionError(f"{twice[0]} is given twice, in speculative_config and by itself")
    recipe = Recipe(
        model=rest["model"],
        speculative_config={**whole, **config},
        load=LoadOptions(**given[LoadOptions]),
        engine=EngineOptions(**given[EngineOptions]),
    )
    return recipe, ServeOptions(**given[ServeOptions]), ScaleOptions(**{"ray": True, **given[ScaleOptions]})


def _typed(name: str, hint: Any, value: Any) -> Any:
    if not isinstance(value, str):
        return value  # its owner says what is wrong with it
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except ValidationError as error:
        raise OptionError(f"{name} {value!r}: {error.errors()[0]['msg']}") from None


def _number(value: Any) -> Any:
    """A drafter's options are many; those that are numbers and switches look like it."""
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
        return {"true": True, "false": False}.get(value.lower(), value)
    return value

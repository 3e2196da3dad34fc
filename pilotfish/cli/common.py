"""What several commands have: flags for models, drafting and sampling, and what is made of their values.

It does not know any command. The one trick: flags come from the fields of the option dataclasses, so an option of a
drafter in a file of its own is a flag of every command that drafts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import click

from .. import flags
from ..decoding.grammar import StructuredOutputsParams
from ..decoding.sampling import SamplingParams
from ..drafters import registry
from ..engine.options import EngineOptions
from ..errors import OptionError
from ..models.options import LoadOptions

_SAMPLING_DEFAULTS = {"temperature": 0.0}  # at the prompt people expect the same answer twice

name_flag = click.option("-m", "--model", default="demo", show_default=True, help="folder, hub id, GGUF file, or demo")


def model_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    return name_flag(flags.from_fields(LoadOptions, EngineOptions)(command))


def drafting_flags(
    several: bool = False, without: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """--method, --draft-model, and every option of every method."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        kinds: list[type] = [
            registry.CommonOptions,
            *(registry.drafter_class(name).Options for name in registry.methods()),
        ]
        command = flags.from_fields(*kinds, without=without)(command)
        again = "; may be given several times" if several else ""
        command = click.option(
            "--method", multiple=several, help=f"how to draft: {', '.join(registry.methods())}{again}"
        )(command)
        return click.option(
            "--speculative-config", metavar="JSON", help="vLLM's JSON, or @FILE; the flags below are short forms"
        )(command)

    return decorate


def sampling_flags(
    default: Mapping[str, float] = _SAMPLING_DEFAULTS,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        command = flags.from_fields(SamplingParams, StructuredOutputsParams, default=default)(command)
        command = click.option(
            "--stop", multiple=True, help="end the text before this string; may be given several times"
        )(command)
        return click.option("--stop-token-ids", multiple=True, type=int, help="end the text after this token id")(
            command
        )

    return decorate


def load_llm(model: str, values: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Any:
    """config: instead of what the flags say of drafting."""
    from ..llm import LLM

    load, engine = flags.pick(LoadOptions, values), flags.pick(EngineOptions, values)
    drafting = speculative_config(values) if config is None else config
    llm = LLM(model, speculative_config=drafting, **asdict(load), **asdict(engine))
    click.echo(llm.describe(), err=True)
    if not drafting:
        click.echo("nothing drafts: give --method (suffix and ngram need nothing else), or --draft-model", err=True)
    return llm


def speculative_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """The speculative config: the JSON, then the short flags."""
    config = flags.read_json(values["speculative_config"]) if values.get("speculative_config") else {}
    for parameter, name in ({"method": "method"} | registry.keywords()).items():
        value = values.get(parameter)
        if value is not None and value != ():
            if name in config:
                raise OptionError(f"{name} is given twice, in --speculative-config and as a flag")
            config[name] = value
    return config


def sampling_params(values: Mapping[str, Any], default: Mapping[str, Any] = _SAMPLING_DEFAULTS) -> SamplingParams:
    given = flags.given(values)
    names = {spec.metadata.get("flag", spec.name): spec.name for spec in fields(StructuredOutputsParams)}
    wish = {name: given[flag] for flag, name in names.items() if given.get(flag)}
    wanted = StructuredOutputsParams(**wish) if wish else None
    return flags.pick(SamplingParams, values, structured_outputs=wanted, **default)

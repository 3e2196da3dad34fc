"""serve and batch: many requests, here or on Ray.

It does not know HTTP. The one trick: what an extra brings is imported when the command runs; a missing one is named.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import click

from .. import flags
from ..engine.options import EngineOptions
from ..errors import OptionError
from ..models.options import LoadOptions
from ..scale.environment import prepare
from ..scale.options import NOT_OF_A_BATCH, ScaleOptions
from ..server.options import BatchOptions, ServeOptions
from .common import drafting_flags, load_llm, model_flags, speculative_config
from .group import main

_EXTRAS = {"serve": ("prometheus_client", "pydantic", "starlette", "uvicorn"), "ray": ("ray", "pandas", "pyarrow")}

_adapters_flag = click.option(
    "--adapters",
    multiple=True,
    metavar="NAME=FOLDER",
    help="a LoRA adapter kept beside the weights: a request whose model is NAME is written by it; may be given several "
    "times",
)


@main.command()
@model_flags
@_adapters_flag
@drafting_flags()
@flags.from_fields(ServeOptions, ScaleOptions)
def serve(model: str, **values: Any) -> None:
    """Serve the OpenAI API.

    Chats, completions, streams, metrics. Ctrl-C or SIGTERM lets running requests end, a second one does not.
    """
    key = os.environ.get("PILOTFISH_API_KEY")
    options = flags.pick(ServeOptions, values, **({} if key is None else {"api_key": key}))
    scale = flags.pick(ScaleOptions, values)
    if scale.ray:
        prepare(scale)
        with _extra("serve --ray"):
            from ..scale.deploy import serve_on_ray
        serve_on_ray(_recipe(model, values), options, scale)
        return
    with _extra("serve"):
        from ..server.run import serve as run
    run(options, lambda: load_llm(model, values))


@main.command()
@click.argument("source", type=click.Path())
@click.argument("target", type=click.Path())
@model_flags
@_adapters_flag
@drafting_flags()
@flags.from_fields(BatchOptions)
@flags.from_fields(ScaleOptions, without=NOT_OF_A_BATCH)
def batch(source: str, target: str, model: str, **values: Any) -> None:
    """Answer the requests in SOURCE, a line each in OpenAI's batch format, into TARGET.

    Many at once, in the order they get ready. However it was ended, the same command goes on where it stopped.
    """
    options, scale = flags.pick(BatchOptions, values), flags.pick(ScaleOptions, values)
    if scale.ray:
        prepare(scale)
        with _extra("batch --ray"):
            from ..scale.data import run_batch_on_ray
        run_batch_on_ray(options, source, target, _recipe(model, values), scale)
        return
    with _extra("batch"):
        from ..server.batch import run_batch
    run_batch(options, source, target, lambda: load_llm(model, values))


def _recipe(model: str, values: Mapping[str, Any]) -> Any:
    """What each engine loads for itself, elsewhere."""
    from ..scale.recipe import Recipe

    load, engine = flags.pick(LoadOptions, values), flags.pick(EngineOptions, values)
    return Recipe(model=model, speculative_config=speculative_config(values), load=load, engine=engine)


@contextlib.contextmanager
def _extra(command: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        for extra, packages in _EXTRAS.items():
            if missing in packages:
                told = f"{command} needs {missing}, which is not installed: pip install 'pilotfish[{extra}]'"
                raise OptionError(told) from None
        raise

"""train: heads that draft, from nothing but the model.

It does not know how they are trained.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from .. import flags
from ..errors import OptionError
from ..models.options import LoadOptions
from ..train.options import Eagle3Options, MedusaOptions, TrainOptions
from .common import name_flag
from .group import main


@main.group()
def train() -> None:
    """Train a head that drafts for a model.

    No data set is needed: the target writes the text. A second start with the same --out goes on where it stopped.
    """


def _training_flags(kind: type[TrainOptions]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    loading = flags.from_fields(LoadOptions, default={"quantization": "int8 on a CPU, none elsewhere"})
    return lambda command: name_flag(flags.from_fields(kind)(loading(command)))


@train.command()
@_training_flags(Eagle3Options)
def eagle3(model: str, **values: Any) -> None:
    """A small decoder layer that reads the target's states: the stronger head."""
    _train(Eagle3Options, model, values)


@train.command()
@_training_flags(MedusaOptions)
def medusa(model: str, **values: Any) -> None:
    """Heads that each guess one token further ahead: the head that is trained sooner."""
    _train(MedusaOptions, model, values)


def _train(kind: type[TrainOptions], model: str, values: Mapping[str, Any]) -> None:
    from ..train import run_train

    if values["out"] is None:
        raise OptionError("give --out: the folder for texts, checkpoints and the head")
    names = {spec.name for spec in fields(LoadOptions)}
    given = {name: value for name, value in flags.given(values).items() if name in names}
    trained = run_train(flags.pick(kind, values), model, given)
    if trained.report is not None and trained.report.environment["interrupted"]:  # the head is there; its bench is not
        raise SystemExit(130)

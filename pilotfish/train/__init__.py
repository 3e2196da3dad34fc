"""Training of draft heads: text collected from the target, and heads that learn to guess it. `run` starts it all."""

from .. import lazily

__all__ = ["Eagle3Options", "MedusaOptions", "TrainOptions", "run_train"]
_HOMES = dict.fromkeys(__all__, "options") | {"run_train": "run"}
__getattr__ = lazily.names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__

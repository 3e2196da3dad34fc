"""ScaleOptions: how many replicas, and of what; the command line is generated from the fields.

It does not know Ray. The one trick: a number that means nothing without Ray is refused without it, not ignored.
"""

import math
from dataclasses import dataclass, field, fields

from ..errors import OptionError

NOT_OF_A_BATCH = ("fronts",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOptions:
    """Raises OptionError for values out of range, and for any that is given without ``ray``."""

    ray: bool = field(default=False, metadata={"help": "run replicas of the engine on Ray, on all its machines"})
    ray_address: str | None = field(
        default=None, metadata={"help": "of a Ray cluster, or auto; RAY_ADDRESS, else a cluster of our own, if unset"}
    )
    replicas: int = field(default=1, metadata={"help": "engines on Ray, each with the whole model"})
    min_replicas: int | None = field(
        default=None, metadata={"help": "let Ray start and end engines by the requests that wait: at least so many"}
    )
    max_replicas: int | None = field(default=None, metadata={"help": "the same: at most so many"})
    cpus_per_replica: float = field(
        default=1.0, metadata={"help": "cores that Ray sets aside for each engine, which are its threads too"}
    )
    gpus_per_replica: float = field(default=0.0, metadata={"help": "GPUs that Ray sets aside for each engine"})
    fronts: int = field(
        default=1, metadata={"help": "processes that hand requests to the engines; one feeds many engines"}
    )

    def __post_init__(self) -> None:
        for name in ("replicas", "min_replicas", "max_replicas", "fronts"):
            value = getattr(self, name)
            if value is None and name.endswith("_replicas"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{name} must be a whole number, 1 or more, not {value!r}")
        for name in ("cpus_per_replica", "gpus_per_replica"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise OptionError(f"{name} must be a number, 0 or more, not {value!r}")
        if self.ray_address is not None and (not isinstance(self.ray_address, str) or not self.ray_address):
            raise OptionError(f"ray_address must be a text such as auto or 10.0.0.1:6379, not {self.ray_address!r}")
        if (self.min_replicas is None) != (self.max_replicas is None):
            raise OptionError("min_replicas and max_replicas go together: give both, or replicas")
        if self.min_replicas is not None and self.max_replicas is not None:
            if self.min_replicas > self.max_replicas:
                raise OptionError(f"min_replicas {self.min_replicas} is more than max_replicas {self.max_replicas}")
            if self.replicas != 1:
                raise OptionError("replicas is a fixed number, min_replicas and max_replicas bound one: give one kind")
        if not self.ray:
            for spec in fields(self):
                if getattr(self, spec.name) != spec.default:
                    raise OptionError(f"{spec.name} says how to run on Ray: give --ray too")

    @property
    def most(self) -> int:
        """Engines there may be at once."""
        return self.max_replicas or self.replicas

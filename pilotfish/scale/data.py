"""`pilotfish batch --ray`: the same batch, its lines answered by a pool of engines on Ray Data.

It does not know files: what is resumed, and how an answer is kept, is the plain batch's `Journal`, on the machine of
the command. The one trick: a block of lines is answered as a whole and in order, so one that Ray does again on another
machine, because the first was lost, is the same block; and what has an answer is not kept twice.
"""

import asyncio
import logging
import math
from pathlib import Path
from typing import Any

import ray
from pydantic_core import from_json, to_json
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayError

from ..errors import PilotfishError
from ..server.app import Server
from ..server.batch import Journal, answer_line, resumably
from ..server.options import BatchOptions, ServeOptions
from .deploy import cluster
from .options import ScaleOptions
from .recipe import Recipe
from .replica import Makes

_BLOCKS_AT_ONCE = 2  # of an engine: while the last lines of one end, the next has begun


class Answerer:
    """One engine of the pool."""

    def __init__(self, recipe: Makes, options: ServeOptions):
        self._server = Server(recipe.make(), options)
        self._started = False

    async def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        """A column ``line`` of JSON to a column ``answer``, in the same order."""
        if not self._started:
            self._server.engine.start()
            self._started = True
        answers = (answer_line(self._server, from_json(line)) for line in block["line"])
        return {"answer": [to_json(one).decode() for one in await asyncio.gather(*answers)]}


def run_batch_on_ray(
    options: BatchOptions,
    source: str | Path,
    target: str | Path,
    recipe: Makes,
    scale: ScaleOptions,
    num_seats: int | None = None,
) -> None:
    """Answer what has no answer yet. Raises as `run_batch`; num_seats as for `application`."""
    if num_seats is None:
        assert isinstance(recipe, Recipe)
        num_seats = recipe.num_seats

    def work(journal: Journal) -> None:
        lines = [{"line": to_json(line).decode()} for line in journal.todo()]
        with cluster(scale):
            try:
                for row in _answered(lines, recipe, options.serving(), scale, num_seats).iter_rows():
                    answer = from_json(row["answer"])
                    if answer["custom_id"] not in journal.done:
                        journal.keep(answer)
            except RayError as error:
                raise PilotfishError(f"the engines stopped; the same command goes on: {error}") from error

    resumably(source, target, work)


def _answered(lines: list[Any], recipe: Makes, options: ServeOptions, scale: ScaleOptions, num_seats: int) -> Any:
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # our own progress is shown
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    pool = ActorPoolStrategy(
        min_size=scale.min_replicas or scale.replicas,
        max_size=scale.most,
        max_tasks_in_flight_per_actor=_BLOCKS_AT_ONCE,
        max_concurrent_calls_per_actor=_BLOCKS_AT_ONCE,
    )
    return ray.data.from_items(lines, override_num_blocks=math.ceil(len(lines) / num_seats)).map_batches(
        Answerer,
        fn_constructor_args=(recipe, options),
        batch_size=None,
        batch_format="numpy",
        compute=pool,
        num_cpus=scale.cpus_per_replica,
        num_gpus=scale.gpus_per_replica,
    )

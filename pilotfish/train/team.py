"""The processes that train together: one, unless `accelerate launch` started several.

It does not know what is trained. The one trick: every process takes its own pack of a step and gradients are averaged
by hand, between all backward passes and the optimiser's step; so the training never learns that it is not alone.
"""

import os
from collections.abc import Iterable
from typing import Any

import torch


class Team:
    """This process's place among ``size``; rank 0 collects, says, writes and benches."""

    def __init__(self) -> None:
        self._accelerator: Any = None
        self.rank, self.size = 0, 1
        self.device: torch.device | None = None  # None: as the options say
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import Accelerator  # type: ignore[import-untyped]

            self._accelerator = Accelerator()
            self.rank, self.size = self._accelerator.process_index, self._accelerator.num_processes
            self.device = self._accelerator.device

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def average(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Each parameter's gradient becomes the mean of all processes'; one that has none counts as zero."""
        if self._accelerator is None:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = self._accelerator.reduce(parameter.grad, reduction="mean")

    def wait(self) -> None:
        """Until all are here."""
        if self._accelerator is not None:
            self._accelerator.wait_for_everyone()

"""One thread per process: the tests run in several, and their matrices are tiny. And no test leaves a model of its own,
or what passes of it cost, in the user's cache."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pilotfish.engine import costs
from pilotfish.models import quantize
from pilotfish.models.disk_cache import cache_folder

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a test that names no cache keeps them. Kernels, and the demo model in each of its forms, are slow to make
    and the same in every run: those are the user's."""
    folder, prepared, users = tmp_path_factory.mktemp("cache"), quantize.prepared, cache_folder()

    def chosen() -> Path:
        return folder if cache_folder() == users else cache_folder()

    def apart(name: str, fill: Callable[[Path], None], say: Callable[[str], None]) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            if not name.startswith("demo-"):
                patch.setenv("PILOTFISH_CACHE", str(chosen()))
            return prepared(name, fill, say)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize, "prepared", apart)
        patch.setattr(costs, "cache_folder", chosen)
        yield folder

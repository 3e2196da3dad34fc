"""How many pages a pool gets. Untouched pages cost nothing on a CPU; on a GPU the bound is what is free there."""

import torch

from ..models.base import ModelInfo
from .options import EngineOptions


def bytes_per_token(info: ModelInfo) -> int:
    """Bytes of keys and values that one token takes over all layers."""
    size = torch.empty((), dtype=info.dtype).element_size()
    return sum(layer.num_heads * (layer.key_dim + layer.value_dim) for layer in info.layers) * size


def size_pool(info: ModelInfo, options: EngineOptions, max_length: int) -> int:
    """Pages for every seat at full length, but at most ``kv_cache_memory`` GiB, and at least one page."""
    if options.num_pages is not None:
        return options.num_pages
    wanted = options.max_num_seqs * (max_length + 64)
    affordable = int(min(options.kv_cache_memory, 2**30) * 2**30) // max(1, bytes_per_token(info))
    return max(1, min(wanted, affordable) // options.block_size)

"""llama.cpp through llama-cpp-python: a GGUF file as it is, or the same in Q8_0, plain or with its prompt lookup.

Knows nothing of pilotfish. The one trick: Q8_0 is made from the given file by llama.cpp itself; a file of fewer bits
gains nothing in quality by that, but has the speed and the size of 8 bits.
"""

import ctypes
import pathlib
from collections.abc import Callable
from typing import Any


class Worker:
    def prepare(self, settings: dict[str, Any]) -> None:
        """Write the Q8_0 file."""
        import llama_cpp

        path = _path(settings)
        if path.exists():
            return
        partial = path.with_suffix(".partial")
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, True
        params.nthread = settings["threads"]
        status = llama_cpp.llama_model_quantize(settings["gguf"].encode(), str(partial).encode(), ctypes.byref(params))
        if status != 0:
            raise RuntimeError(f"llama_model_quantize returned {status} for {settings['gguf']}")
        partial.rename(path)

    def load(self, settings: dict[str, Any]) -> dict[str, Any]:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        (self.variant,) = settings["variants"]
        own = settings["variants"][self.variant]
        draft = LlamaPromptLookupDecoding(**own["prompt_lookup"]) if "prompt_lookup" in own else None
        self.stop_ids = set(settings["stop_ids"])
        self.llama = llama_cpp.Llama(
            str(_path(settings)),
            n_ctx=settings["context"],
            n_threads=settings["threads"],
            n_threads_batch=settings["threads"],
            draft_model=draft,
            logits_all=draft is not None,  # else it keeps room for 512 rows of them only, and fails beyond
            verbose=False,
        )
        name = self.llama.metadata.get("general.file_type", "?")
        precision = _FILE_TYPES.get(name, f"file type {name}")
        return {"version": llama_cpp.__version__, "precision": precision}

    def run(self, variant: str, ids: list[int], max_tokens: int, emit: Callable[[list[int]], None]) -> None:
        assert variant == self.variant
        self.llama.reset()
        self.llama._ctx.kv_cache_clear()  # or a shared beginning would be taken from the prompt before
        for count, token in enumerate(self.llama.generate(ids, temp=0.0), 1):
            emit([token])
            if count == max_tokens or token in self.stop_ids:
                return


_FILE_TYPES = {"0": "F32", "1": "F16", "2": "Q4_0", "3": "Q4_1", "7": "Q8_0", "14": "Q4_K_S", "15": "Q4_K_M"}


def _path(settings: dict[str, Any]) -> pathlib.Path:
    if settings["weights"] == "as given":
        return pathlib.Path(settings["gguf"])
    return pathlib.Path(settings["cache"]) / "llama-cpp-q8_0.gguf"

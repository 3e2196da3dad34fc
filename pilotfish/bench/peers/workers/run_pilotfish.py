"""pilotfish itself, through `LLM.stream`: plain, and with each speculative config.

The one worker that needs pilotfish. The one trick: the target is loaded once, and each variant is an engine around it.
"""

from collections.abc import Callable
from typing import Any


class Worker:
    def prepare(self, settings: dict[str, Any]) -> None:
        """Quantised weights are stored when they are first loaded."""
        if settings["weights"] != "float32":
            self.load(settings)

    def load(self, settings: dict[str, Any]) -> dict[str, Any]:
        import torch

        from pilotfish import LLM, __version__
        from pilotfish.models.load import load

        torch.set_num_threads(settings["threads"])
        weights: Any = "none" if settings["weights"] == "float32" else settings["weights"]
        target = load(settings["gguf" if weights == "gguf" else "model"], quantization=weights)
        self.llms = {
            name: LLM.from_model(
                target,
                speculative_config=config or None,
                max_num_seqs=1,
                max_model_len=settings["context"],
                enable_prefix_caching=False,
            )
            for name, config in settings["variants"].items()
        }
        info = target.model.info
        precision = str(info.dtype).removeprefix("torch.") if info.quantization == "none" else info.quantization
        return {"version": __version__, "precision": precision}

    def run(self, variant: str, ids: list[int], max_tokens: int, emit: Callable[[list[int]], None]) -> None:
        from pilotfish import SamplingParams

        for chunk in self.llms[variant].stream(ids, SamplingParams(temperature=0, max_tokens=max_tokens)):
            if chunk.token_ids:
                emit(list(chunk.token_ids))

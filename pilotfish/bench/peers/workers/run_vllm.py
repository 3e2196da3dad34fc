"""vLLM's CPU build: plain, with n-gram lookup, or with a draft model.

Knows nothing of pilotfish. The one trick: its engine is stepped by hand in this process, so tokens are seen as they
come.
"""

import os
from collections.abc import Callable
from typing import Any


class Worker:
    def prepare(self, settings: dict[str, Any]) -> None:
        """Nothing is made."""

    def load(self, settings: dict[str, Any]) -> dict[str, Any]:
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")
        os.environ["VLLM_CACHE_ROOT"] = (
            f"{settings['cache']}/vllm"  # what it compiles: kept, and apart from the user's own
        )
        import vllm

        (self.variant,) = settings["variants"]
        speculative = settings["variants"][self.variant].get("speculative_config")
        if speculative and speculative["method"] == "draft_model":
            speculative = speculative | {"model": settings["draft_model"]}
        self.stop_ids = settings["stop_ids"]
        self.llm = vllm.LLM(
            settings["model"],
            dtype=settings["weights"],
            max_model_len=settings["context"],
            max_num_seqs=1,
            speculative_config=speculative,
            enable_prefix_caching=False,
        )
        return {"version": vllm.__version__, "precision": settings["weights"]}

    def run(self, variant: str, ids: list[int], max_tokens: int, emit: Callable[[list[int]], None]) -> None:
        from vllm import SamplingParams

        assert variant == self.variant
        params = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=self.stop_ids, detokenize=False)
        engine, seen = self.llm.llm_engine, 0
        engine.add_request("only", {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
                if len(tokens) > seen:
                    emit(tokens[seen:])
                    seen = len(tokens)

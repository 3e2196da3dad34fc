"""transformers' `generate`: eager, with a compiled static cache, with prompt lookup, and with an assistant model.

Knows nothing of pilotfish. The one trick: a streamer is called once per step with all tokens of the step, first of
all with the prompt.
"""

from collections.abc import Callable
from typing import Any


class Worker:
    def prepare(self, settings: dict[str, Any]) -> None:
        """Nothing is made."""

    def load(self, settings: dict[str, Any]) -> dict[str, Any]:
        import torch
        import transformers

        torch.set_num_threads(settings["threads"])
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        self.settings = settings
        self.model = load(settings["model"], dtype=torch.float32).eval()
        self.draft = None
        if any(own.get("draft") for own in settings["variants"].values()):
            self.draft = load(settings["draft_model"], dtype=torch.float32).eval()
        return {"version": transformers.__version__, "precision": "float32"}

    def run(self, variant: str, ids: list[int], max_tokens: int, emit: Callable[[list[int]], None]) -> None:
        import torch
        from transformers.generation.streamers import BaseStreamer

        class Streamer(BaseStreamer):
            prompt_seen = False

            def put(self, value: Any) -> None:
                if self.prompt_seen:
                    emit(value.flatten().tolist())
                self.prompt_seen = True

            def end(self) -> None:
                pass

        prompt = torch.tensor([ids])
        with torch.inference_mode():
            self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=self._config(variant, max_tokens),
                streamer=Streamer(),
                **self._state(variant),
            )

    def _config(self, variant: str, max_tokens: int) -> Any:
        from transformers import CompileConfig, GenerationConfig

        new: Any = GenerationConfig  # which is untyped
        own, stop_ids = self.settings["variants"][variant], self.settings["stop_ids"]
        config = new(max_new_tokens=max_tokens, do_sample=False, eos_token_id=stop_ids or None)
        config.pad_token_id = stop_ids[0] if stop_ids else None
        config.prompt_lookup_num_tokens = own.get("prompt_lookup_num_tokens")
        if own.get("static"):
            config.compile_config = CompileConfig(fullgraph=False, dynamic=False, mode="default")
            config.compile_config._compile_all_devices = True  # generate compiles on GPUs alone by itself
        return config

    def _state(self, variant: str) -> dict[str, Any]:
        """What generate is given besides."""
        own = self.settings["variants"][variant]
        if own.get("draft"):
            return {"assistant_model": self.draft}
        if own.get("static"):  # one size for all prompts, or each would be compiled afresh
            from transformers import StaticCache

            if not hasattr(self, "cache"):
                self.cache: Any = StaticCache(config=self.model.config, max_cache_len=self.settings["context"])
            self.cache.reset()
            return {"cache": self.cache}
        return {}

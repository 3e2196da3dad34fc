"""OpenVINO GenAI: `LLMPipeline` as its documentation builds it, plain, with prompt lookup or with a draft model.

Knows nothing of pilotfish. The one trick: the streamer is called once per step with all tokens of the step.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any


class Worker:
    def prepare(self, settings: dict[str, Any]) -> None:
        """Convert target and draft with optimum-intel, in a process of its own."""
        for model, cache in (
            (settings["model"], settings["cache"]),
            (settings["draft_model"], settings["draft_cache"]),
        ):
            if model is not None:
                _convert(pathlib.Path(model), _folder(cache, settings), settings["weights"])

    def load(self, settings: dict[str, Any]) -> dict[str, Any]:
        import openvino_genai as genai

        self.genai, self.settings = genai, settings
        (self.variant,) = settings["variants"]
        own = settings["variants"][self.variant]
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": settings["threads"]}
        if own.get("draft"):
            draft = str(_folder(settings["draft_cache"], settings))
            options["draft_model"] = genai.draft_model(draft, "CPU", INFERENCE_NUM_THREADS=settings["threads"])
        if own.get("prompt_lookup"):
            options["prompt_lookup"] = True
        self.pipeline = genai.LLMPipeline(str(_folder(settings["cache"], settings)), "CPU", **options)
        self.config = {name: own[name] for name in ("num_assistant_tokens", "max_ngram_size") if name in own}
        precision = f"{settings['weights']} weights"
        return {"version": version("openvino-genai"), "precision": precision}

    def run(self, variant: str, ids: list[int], max_tokens: int, emit: Callable[[list[int]], None]) -> None:
        import numpy as np
        import openvino as ov

        genai = self.genai
        assert variant == self.variant

        class Streamer(genai.StreamerBase):  # type: ignore[misc, name-defined]
            def write(self, tokens: Any) -> Any:
                emit([tokens] if isinstance(tokens, int) else list(tokens))
                return genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        config = genai.GenerationConfig(**self.config)
        config.max_new_tokens, config.do_sample = max_tokens, False
        config.stop_token_ids = set(self.settings["stop_ids"])
        self.pipeline.generate(ov.Tensor(np.array([ids], dtype=np.int64)), config, Streamer())


def _folder(cache: str, settings: dict[str, Any]) -> pathlib.Path:
    return pathlib.Path(cache) / f"openvino-{settings['weights']}"


def _convert(model: pathlib.Path, folder: pathlib.Path, weights: str) -> None:
    if folder.is_dir():
        return
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = [str(pathlib.Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
    command += ["--model", str(model), "--task", "text-generation-with-past", "--weight-format", weights]
    if weights == "int4":
        command += ["--group-size", str(_group_size(model))]
    subprocess.run([*command, str(partial)], check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    partial.rename(folder)


def _group_size(model: pathlib.Path) -> int:
    """The largest usual one that divides the rows of all matrices; optimum's own default is 128."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return next(
        size for size in (128, 64, 32) if config["hidden_size"] % size == config["intermediate_size"] % size == 0
    )

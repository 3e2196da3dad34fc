"""The table of engines: pinned requirements, worker script, and the processes that together run all its variants.

It does not start anything. The one trick: variants that can share a loaded model share a process; those that cannot
have one each, so that its memory is theirs alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import unknown_name
from .options import PeersOptions

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to decode. settings: what the worker is told; needs_draft: without a draft model it is left out."""

    name: str = PLAIN
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs_draft: bool = False


@dataclass(frozen=True, slots=True)
class Process:
    """One worker: an engine with one form of weights and the variants that run on them.

    bytes_per_weight, of target and draft alike, and spare_gb estimate what it takes in memory, without files that are
    mapped into it, which the system can drop.
    """

    engine: str
    weights: str
    variants: tuple[Variant, ...]
    bytes_per_weight: float
    spare_gb: float = 0.6

    def label(self, variant: str) -> str:
        return f"{self.engine} {self.weights} {variant}"


@dataclass(frozen=True, slots=True)
class Engine:
    """requirements: a file in requirements/, installed as it stands; None: this Python runs it. script: in workers/.
    build: environment variables for its installation. note: what the table says about it."""

    name: str
    script: str
    requirements: str | None
    processes: tuple[Process, ...] = ()
    build: Mapping[str, str] = field(default_factory=dict)
    needs_gguf: bool = False
    note: str = ""


_OPENVINO = (
    Variant(),
    Variant("prompt lookup", {"prompt_lookup": True, "num_assistant_tokens": 5, "max_ngram_size": 3}),
    Variant("draft model", {"draft": True, "num_assistant_tokens": 5}, needs_draft=True),
)
# The library's own advice: guess 10 tokens on a GPU, 2 on a CPU.
_LLAMA_CPP = (Variant(), Variant("prompt lookup", {"prompt_lookup": {"num_pred_tokens": 2}}))
_VLLM = (
    Variant(),
    Variant(
        "ngram",
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}},
    ),
)
_TRANSFORMERS = (
    Variant(),
    Variant("static cache, compiled", {"static": True}),
    Variant("prompt lookup", {"prompt_lookup_num_tokens": 10}),
    Variant("assistant model", {"draft": True}, needs_draft=True),
)


def _each(engine: str, weights: Mapping[str, float], variants: Sequence[Variant], spare_gb: float) -> Iterator[Process]:
    for name, num_bytes in weights.items():
        for variant in variants:
            yield Process(engine, name, (variant,), num_bytes, spare_gb)


_PEERS = (
    Engine(
        "openvino",
        "run_openvino.py",
        "openvino.txt",
        tuple(_each("openvino", {"int8": 1.0, "int4": 0.7}, _OPENVINO, 0.3)),
        note="5 tokens guessed",
    ),
    Engine(
        "llama.cpp",
        "run_llama_cpp.py",
        "llama_cpp.txt",
        tuple(_each("llama.cpp", {"Q8_0": 0.8, "as given": 0.7}, _LLAMA_CPP, 0.2)),
        build={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
        needs_gguf=True,
        note="2 tokens guessed, its advice for CPUs; its Python package drafts with no second model",
    ),
    Engine(
        "transformers",
        "run_transformers.py",
        None,
        (Process("transformers", "float32", _TRANSFORMERS, 4.1, 1.0),),
        note="10 tokens looked up; the assistant model with the library's defaults",
    ),
    Engine(
        "vllm",
        "run_vllm.py",
        "vllm.txt",
        tuple(_each("vllm", {"bfloat16": 2.5}, _VLLM, 2.5)),
        note="its CPU build, in the number format that it runs in",
    ),
)


def table(options: PeersOptions) -> list[Engine]:
    """The engines that are asked for. Raises OptionError for a name that is none."""
    known = {engine.name: engine for engine in (_pilotfish(options), *_PEERS)}
    for name in options.engines:
        if name not in known:
            raise unknown_name("engine", name, known)
    return [engine for engine in known.values() if not options.engines or engine.name in options.engines]


def _pilotfish(options: PeersOptions) -> Engine:
    processes = []
    for weights in options.quantization:
        alone: list[Variant] = [Variant()]
        drafted: list[Variant] = []
        for name, config in options.configs.items():
            needs = config.get("method", "draft_model") in ("draft_model", "staged") and "model" not in config
            own = config | {"model": options.draft_model} if needs else config
            (drafted if needs else alone).append(Variant(name, own, needs))
        name, num_bytes = ("float32", 4.1) if weights == "none" else (weights, 1.1)
        for variants in (alone, drafted):
            if variants:
                processes.append(Process("pilotfish", name, tuple(variants), num_bytes, 0.45))
    return Engine("pilotfish", "run_pilotfish.py", None, tuple(processes))

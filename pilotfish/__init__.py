"""pilotfish: lossless speculative decoding. A small fish swims ahead; the text is still the big one's."""

from typing import TYPE_CHECKING

from . import lazily, version

if TYPE_CHECKING:
    from .decoding.grammar import StructuredOutputsParams
    from .decoding.request import TokenLogprob
    from .decoding.sampling import SamplingParams
    from .errors import (
        CapacityError,
        DraftError,
        ModelError,
        OptionError,
        PilotfishError,
        PromptError,
        UserError,
    )
    from .llm import LLM, Chunk, Completion, Interrupted, Usage

__version__ = version.VERSION

__all__ = [
    "LLM",
    "CapacityError",
    "Chunk",
    "Completion",
    "DraftError",
    "Interrupted",
    "ModelError",
    "OptionError",
    "PilotfishError",
    "PromptError",
    "SamplingParams",
    "StructuredOutputsParams",
    "TokenLogprob",
    "Usage",
    "UserError",
]
_HOMES = dict.fromkeys(__all__, "errors")
_HOMES |= dict.fromkeys(("LLM", "Chunk", "Completion", "Interrupted", "Usage"), "llm")
_HOMES |= {
    "StructuredOutputsParams": "decoding.grammar",
    "SamplingParams": "decoding.sampling",
    "TokenLogprob": "decoding.request",
}
__getattr__ = lazily.names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__

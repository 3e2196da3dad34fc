"""pilotfish: lossless speculative decoding. A small fish swims ahead; the text is still the big one's."""

from . import version
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
    "TokenLogprob",
    "Usage",
    "UserError",
]

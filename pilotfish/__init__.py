"""pilotfish: lossless speculative decoding. A small fish swims ahead; the text is still the big one's."""

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
from .llm import LLM, Chunk, Completion, Usage
from .version import VERSION

__version__ = VERSION

__all__ = [
    "LLM",
    "CapacityError",
    "Chunk",
    "Completion",
    "DraftError",
    "ModelError",
    "OptionError",
    "PilotfishError",
    "PromptError",
    "SamplingParams",
    "TokenLogprob",
    "Usage",
    "UserError",
]

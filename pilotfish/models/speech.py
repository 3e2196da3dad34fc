"""Models that hear: what their encoder reads, how a text of theirs begins, and what they are not let say.

It does not know passes, pages or engines. The one trick: what transformers' own `generate` adds to such a model (the
beginning of a text, forbidden tokens) is read once from the generation config and put in words that every request has
anyway: a beginning, a bias, tokens that cannot be the first. What depends on the sound, or is a rule about the text
before (the language that is heard, timestamps), is refused instead of left out.

Whisper: Radford et al. 2022, arXiv 2212.04356.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..decoding.sampling import SamplingParams
from ..decoding.source import Features
from ..errors import PromptError

FAMILIES = ("whisper",)


@dataclass(frozen=True, slots=True)
class Speech:
    """name: the model's. shape: mel bins and frames that its encoder reads.

    start: the token that a text of the model begins with. opening: what it begins with if nothing is asked for; empty
    if that cannot be said, and then reason tells why. no_timestamps: the token without which the model would write
    timestamps, None if it has none. suppressed, suppressed_first: ids that are never said, and not as the first.
    """

    name: str
    shape: tuple[int, int]
    start: int
    opening: tuple[int, ...]
    reason: str = ""
    no_timestamps: int | None = None
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()

    def beginning(self, given: Sequence[int]) -> tuple[int, ...]:
        """What the decoder's text begins with. given: what the caller wants behind the start token, or that token with
        what stands around it; empty: the usual.

        Raises PromptError where the usual cannot be said, and for a beginning behind which timestamps would follow.
        """
        if len(given) == 0:
            if self.reason:
                raise PromptError(f"{self.name}: {self.reason}")
            return self.opening
        tokens = tuple(given) if self.start in given else (self.start, *given)
        behind = tokens[len(tokens) - tokens[::-1].index(self.start) :]
        if self.no_timestamps is not None and self.no_timestamps not in behind:
            raise PromptError(
                f"the beginning for {self.name} has no token {self.no_timestamps} (<|notimestamps|>) behind its start; "
                "without it the model writes timestamps, whose rules are not applied here: put it at the end"
            )
        return tokens

    def refusal(self, features: Features) -> str | None:
        """Why the encoder cannot read these; None if it can."""
        if features.shape == self.shape:
            return None
        return (
            f"{self.name} reads {self.shape[0]} mel bins of {self.shape[1]} frames, and input_features are "
            f"{features.shape[0]} x {features.shape[1]}; the model's own feature extractor makes and pads them so"
        )

    def ruled(self, params: SamplingParams) -> SamplingParams:
        """The same with what the model is not let say."""
        if not self.suppressed and not self.suppressed_first:
            return params
        never = dict.fromkeys(self.suppressed, -math.inf)
        first = (*params.begin_suppress_tokens, *self.suppressed_first)
        return replace(params, logit_bias={**(params.logit_bias or {}), **never}, begin_suppress_tokens=first)

    def sample(self) -> Features:
        """Noise to try the model on, always the same."""
        return Features(torch.randn(self.shape, generator=torch.Generator().manual_seed(0)))


def features_of(values: Any) -> Features:
    """From an array or tensor, which is copied. Raises PromptError for one that is not [mel bins, frames] of finite
    floats."""
    try:
        copied = values.detach().cpu().clone() if isinstance(values, Tensor) else torch.tensor(np.array(values))
    except (TypeError, ValueError, RuntimeError) as error:
        raise PromptError(f"input_features cannot be read as an array: {str(error).splitlines()[0]}") from error
    if not copied.is_floating_point():
        raise PromptError(f"input_features must be floats, not {str(copied.dtype).removeprefix('torch.')}")
    if copied.dim() != 2 or 0 in copied.shape:
        raise PromptError(
            f"input_features must be [mel bins, frames], not of shape {tuple(copied.shape)}; of a feature extractor's "
            "batch give one, such as batch.input_features[0]"
        )
    if not bool(copied.isfinite().all()):
        raise PromptError("input_features must be finite, and there is a NaN or an infinity among them")
    return Features(copied.contiguous())


def speech_of(model: Any, name: str, shape: tuple[int, int], vocab_size: int) -> Speech:
    """What a Whisper model's configs say."""
    config = model.generation_config
    start = getattr(config, "decoder_start_token_id", None)
    start = int(model.config.decoder_start_token_id if start is None else start)
    no_timestamps = getattr(config, "no_timestamps_token_id", None)
    try:
        opening, reason = _opening(config, model.config, start, no_timestamps), ""
    except PromptError as error:
        opening, reason = (), str(error)
    return Speech(
        name=name,
        shape=shape,
        start=start,
        opening=opening,
        reason=reason,
        no_timestamps=no_timestamps,
        suppressed=_ids(config, "suppress_tokens", vocab_size),
        suppressed_first=_ids(config, "begin_suppress_tokens", vocab_size),
    )


def _ids(config: Any, key: str, vocab_size: int) -> tuple[int, ...]:
    """Those that the model has: transformers steps over others too."""
    return tuple(token for token in getattr(config, key, None) or () if 0 <= token < vocab_size)


def _opening(config: Any, model_config: Any, start: int, no_timestamps: int | None) -> tuple[int, ...]:
    """As in `_retrieve_init_tokens` of transformers' WhisperGenerationMixin, whose order of precedence this is.

    Raises PromptError, without the model's name, where it depends on the sound or asks for what is not done here.
    """
    language, task = getattr(config, "language", None), getattr(config, "task", None)
    own = "give the beginning yourself, as in {'input_features': .., 'prompt': '<|en|><|transcribe|><|notimestamps|>'}"
    if getattr(config, "return_timestamps", None):
        raise PromptError(f"its generation config asks for timestamps, whose rules are not applied here; {own}")
    tokens: list[int | None] = [start]
    if language is None and task is None:
        tokens += _forced(getattr(config, "forced_decoder_ids", None) or
                          getattr(model_config, "forced_decoder_ids", None) or (), own)  # fmt: skip
    languages, tasks = getattr(config, "lang_to_id", None), getattr(config, "task_to_id", None) or {}
    if language is not None:
        tokens.append(_language_id(language, languages or {}, own))
    elif languages is not None and (len(tokens) == 1 or tokens[1] is None):
        raise PromptError(f"which language it hears is not given, and is not detected here; {own}")
    if task is not None or (language is not None and tasks):
        wanted = task or "transcribe"
        if wanted not in tasks:
            raise PromptError(f"its generation config has no token for the task {wanted!r}; {own}")
        tokens.append(tasks[wanted])
    if no_timestamps is not None and tokens[-1] != no_timestamps:
        tokens.append(no_timestamps)
    return tuple(token for token in tokens if token is not None)


def _forced(pairs: Sequence[Sequence[int | None]], own: str) -> list[int | None]:
    """The tokens of places 1, 2, ..; places that begin later are no beginning to transformers either."""
    if not pairs or pairs[0][0] != 1:
        return []
    if [place for place, _ in pairs] != list(range(1, len(pairs) + 1)):
        raise PromptError(f"forced_decoder_ids {list(pairs)} of its generation config leave a gap; {own}")
    return [token for _, token in pairs]


def _language_id(language: Any, languages: dict[str, int], own: str) -> int:
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    name = str(language).lower()
    for key in (name, f"<|{TO_LANGUAGE_CODE.get(name, name)}|>"):
        if key in languages:
            return languages[key]
    raise PromptError(f"its generation config has no token for the language {language!r}; {own}")

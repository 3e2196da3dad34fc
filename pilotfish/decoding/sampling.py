"""SamplingParams and `warp`: from logits to the law that is sampled from.

One `warp` serves target, draft and bonus rows alike, so p and q are shaped by the same code from the same float
type. It does not know which row belongs to whom; a row's context is passed in. The one trick: every step treats a
row on its own (softmax instead of sums over blocks), so a row's law cannot depend on how many rows came with it.

On a CPU rows are numpy's, here, in `noise` and in `verify`: torch would share out a row of 50,000 numbers among its
threads, and those spin for a millisecond or more when they are done, on a core that the next pass wants.

Order, as in vLLM: grammar, logit_bias, begin_suppress_tokens, min_tokens, penalties | temperature, min_p, top_k, top_p.
Left of the bar is `process`, all that greedy decoding needs.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from ..errors import OptionError
from ..lazily import np, torch
from .grammar import StructuredOutputsParams

if TYPE_CHECKING:
    from torch import Tensor

    Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled; names and meanings as in vLLM.

    begin_suppress_tokens: ids that cannot be the first new token, as in Hugging Face's generation config.
    logprobs_mode: log-probabilities of the law that was sampled from, or of the model's own law, before bias,
    penalties, temperature and cuts. vLLM has it as an option of the engine, and its default is the latter.

    Raises OptionError for a value out of range, naming it.
    """

    temperature: float = field(default=1.0, metadata={"help": "0 is greedy; 1 is the model's own law"})
    top_p: float = field(default=1.0, metadata={"help": "keep the smallest set of tokens with this mass"})
    top_k: int = field(default=0, metadata={"help": "keep the k likeliest tokens; 0 keeps all"})
    min_p: float = field(default=0.0, metadata={"help": "drop tokens below this share of the likeliest"})
    repetition_penalty: float = field(default=1.0, metadata={"help": "divide (or multiply) logits of tokens seen"})
    presence_penalty: float = field(default=0.0, metadata={"help": "subtract from logits of tokens in the output"})
    frequency_penalty: float = field(default=0.0, metadata={"help": "subtract per occurrence in the output"})
    logit_bias: Mapping[int, float] | None = None
    max_tokens: int = field(default=256, metadata={"help": "at most this many new tokens"})
    min_tokens: int = field(default=0, metadata={"help": "no end of text before this many new tokens"})
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    begin_suppress_tokens: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = field(default=False, metadata={"help": "go on after the end-of-text token"})
    seed: int | None = field(default=None, metadata={"help": "fixes the text, whatever drafts or batches do"})
    logprobs: int | None = field(default=None, metadata={"help": "also the n likeliest tokens' log-probabilities"})
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    n: int = field(default=1, metadata={"help": "this many independent completions"})
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
                raise OptionError(f"{name} must be a finite number, not {_short(value)}")
        for name in ("top_k", "max_tokens", "min_tokens", "n"):
            _whole(name, getattr(self, name))
        for name in ("include_stop_str_in_output", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} must be True or False, not {getattr(self, name)!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else _several("stop", self.stop)
        object.__setattr__(self, "stop", stop)  # the only place: normalises what the caller passed
        for name in ("stop_token_ids", "begin_suppress_tokens"):
            object.__setattr__(self, name, _several(name, getattr(self, name)))
        _require(self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(self.top_k >= -1, "top_k", self.top_k, "1 or more, or 0 (or -1) for all tokens")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "above 0")
        _require(-2 <= self.presence_penalty <= 2, "presence_penalty", self.presence_penalty, "in [-2, 2]")
        _require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", self.frequency_penalty, "in [-2, 2]")
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, "in [0, max_tokens]")
        _require(self.n >= 1, "n", self.n, "1 or more")
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs)
            _require(self.logprobs >= 0, "logprobs", self.logprobs, "0 or more, or None")
        modes = ("processed_logprobs", "raw_logprobs")
        _require(self.logprobs_mode in modes, "logprobs_mode", self.logprobs_mode, " or ".join(modes))
        if self.seed is not None:
            _whole("seed", self.seed)
        for text in stop:
            _require(isinstance(text, str) and text != "", "stop", text, "non-empty strings")
        for name in ("stop_token_ids", "begin_suppress_tokens"):
            for token in getattr(self, name):
                _token(name, token)
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise OptionError(f"logit_bias must map token ids to numbers, not {self.logit_bias!r}")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            found = repr(self.structured_outputs)
            raise OptionError(f"structured_outputs must be StructuredOutputsParams(...), not {found}")
        for token, bias in (self.logit_bias or {}).items():
            _token("logit_bias", token)
            if not isinstance(bias, (int, float)) or not (bias == -math.inf or abs(bias) <= _LARGEST):
                raise OptionError(f"logit_bias of token {token} must be a number (or -inf), not {_short(bias)}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether a row's law depends on which tokens stand before it, beyond the model's own view."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def processed(self) -> bool:
        """Whether `process` changes anything."""
        return self.penalised or bool(self.logit_bias) or self.min_tokens > 0 or bool(self.begin_suppress_tokens)


_LARGEST = 1e38  # of a bias: logits may be float32
_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "max_tokens", "min_tokens", "n")  # fmt: skip
PARAM_NAMES = frozenset(f.name for f in fields(SamplingParams))


def _short(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # a number of more digits than Python prints
        text = "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(f"{name} must be a whole number, not {value!r}")


def _token(name: str, value: object) -> None:
    """Negative ids would count from the end of the vocabulary."""
    _whole(name, value)
    assert isinstance(value, int)
    _require(value >= 0, name, value, "token ids, 0 or more")


def _several(name: str, values: object) -> tuple[Any, ...]:
    if not isinstance(values, Iterable):
        raise OptionError(f"{name} must be a list, not {values!r}")
    return tuple(values)


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise OptionError(f"{name} must be {wanted}, not {value!r}")


def process(
    logits_NV: Tensor,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    outputs: Sequence[Sequence[int]] = (),
    stop_ids: Set[int] = frozenset(),
    allowed_NV: Tensor | None = None,
) -> Tensor:
    """Logits after bias, min_tokens and penalties, float32 or better, [N, V]; the input is left alone.

    outputs: per row the new tokens before it (accepted drafts of *that row* included); read only if
    ``params.processed``. stop_ids: what min_tokens forbids. Ids beyond V are ignored: a draft head may be smaller.
    allowed_NV: bool, what a grammar allows in each row; None: everything. Where it allows nothing but ends, they stay
    allowed even before min_tokens: there is nothing else to go on with.
    """
    logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    on_cpu = logits_NV.device.type == "cpu"
    if allowed_NV is not None:
        if on_cpu:
            logits_NV = torch.from_numpy(np.where(allowed_NV.numpy(), logits_NV.numpy(), -math.inf))
        else:
            logits_NV = logits_NV.masked_fill(~allowed_NV.to(logits_NV.device), -math.inf)
    if not params.processed:
        return logits_NV
    assert len(outputs) == len(logits_NV), "one context per row"
    num_ids = logits_NV.shape[1]
    logits_NV = torch.from_numpy(logits_NV.numpy().copy()) if on_cpu else logits_NV.clone()
    if known := {token: bias for token, bias in (params.logit_bias or {}).items() if token < num_ids}:
        biases = torch.tensor(list(known.values()), dtype=logits_NV.dtype, device=logits_NV.device)
        logits_NV[:, list(known)] += biases
    banned = [token for token in params.begin_suppress_tokens if token < num_ids]
    for row, output in enumerate(outputs):
        if banned and not output:
            logits_NV[row, banned] = -math.inf
        if len(output) < params.min_tokens:
            ends = [token for token in stop_ids if token < num_ids]
            left_V = None if allowed_NV is None else allowed_NV[row].clone()
            if left_V is not None:
                left_V[ends] = False
            if left_V is None or bool(left_V.any()):
                logits_NV[row, ends] = -math.inf
        if params.penalised:
            _penalise(logits_NV[row], params, prompt, output)
    return logits_NV


def _penalise(logits_V: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> None:
    """In place. Repetition looks at prompt and output, presence and frequency at the output alone (as in vLLM)."""
    num_ids = len(logits_V)
    if params.repetition_penalty != 1:
        seen = torch.tensor([t for t in {*prompt, *output} if t < num_ids], device=logits_V.device)
        if len(seen):
            values = logits_V[seen]
            penalty = params.repetition_penalty
            logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    counts = {token: count for token, count in Counter(output).items() if token < num_ids}
    if counts and (params.presence_penalty or params.frequency_penalty):
        ids = torch.tensor(list(counts), device=logits_V.device)
        times = torch.tensor(list(counts.values()), device=logits_V.device, dtype=logits_V.dtype)
        logits_V[ids] -= params.presence_penalty + params.frequency_penalty * times


def warp(
    logits_NV: Tensor,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    outputs: Sequence[Sequence[int]] = (),
    stop_ids: Set[int] = frozenset(),
    allowed_NV: Tensor | None = None,
) -> Tensor:
    """The laws that are sampled from, [N, V], float32 (float64 for float64 logits), each row summing to 1.

    Arguments as for `process`. Ties at the edge of top_k are all kept; ties inside top_p go by token id. Temperature
    0 is not a law but an argmax: callers take it from `process`.
    """
    assert not params.greedy, "greedy decoding needs no law"
    logits_NV = process(logits_NV, params, prompt, outputs, stop_ids, allowed_NV)
    return (_laws_on_cpu if logits_NV.device.type == "cpu" else _laws)(logits_NV, params)


def _laws(logits_NV: Tensor, params: SamplingParams) -> Tensor:
    """Temperature and cuts, where the rows are."""
    if params.temperature != 1:
        # From the largest down: so no temperature, however small, overflows.
        logits_NV = (logits_NV - logits_NV.amax(1, keepdim=True)) / _temperature(logits_NV, params)
    if params.min_p > 0:
        floor_N1 = logits_NV.amax(1, keepdim=True) + math.log(params.min_p)
        logits_NV = logits_NV.masked_fill(logits_NV < floor_N1, -math.inf)
    if 0 < params.top_k < logits_NV.shape[1]:
        kth_N1 = logits_NV.topk(params.top_k, dim=1).values[:, -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < kth_N1, -math.inf)
    p_NV = torch.softmax(logits_NV, dim=1)
    if params.top_p < 1:
        for row, p_V in enumerate(p_NV):
            logits_NV = logits_NV.clone() if row == 0 else logits_NV
            logits_NV[row].masked_fill_(_outside_nucleus(p_V, params.top_p), -math.inf)
        p_NV = torch.softmax(logits_NV, dim=1)
    return p_NV


def _laws_on_cpu(logits_NV: Tensor, params: SamplingParams) -> Tensor:
    """The same, on one thread. A softmax of one row is torch's, which does that alone."""
    p_NV = torch.empty_like(logits_NV)
    with np.errstate(over="ignore", invalid="ignore"):  # as torch: an overflow is an infinity, and a law of those a NaN
        _fill_laws(p_NV, logits_NV, params)
    return p_NV


def _fill_laws(p_NV: Tensor, logits_NV: Tensor, params: SamplingParams) -> None:
    for row, x_V in enumerate(logits_NV.numpy()):
        if params.temperature != 1:
            x_V = (x_V - x_V.max()) / x_V.dtype.type(_temperature(logits_NV, params))
        if params.min_p > 0:
            x_V = np.where(x_V < x_V.max() + math.log(params.min_p), -math.inf, x_V)
        if 0 < params.top_k < len(x_V):
            x_V = np.where(x_V < np.partition(x_V, -params.top_k)[-params.top_k], -math.inf, x_V)
        torch.softmax(torch.from_numpy(x_V), 0, out=p_NV[row])
        if params.top_p < 1:
            x_V = np.where(_outside_nucleus_on_cpu(p_NV[row].numpy(), params.top_p), -math.inf, x_V)
            torch.softmax(torch.from_numpy(x_V), 0, out=p_NV[row])


def _temperature(logits_NV: Tensor, params: SamplingParams) -> float:
    """One that this float type would round to 0 or infinity says the same as the nearest that it has."""
    limits = torch.finfo(logits_NV.dtype)
    return min(max(params.temperature, limits.tiny), limits.max)


Likeliest = tuple[list[int], list[float]]


def likeliest(logits_NV: Tensor) -> Likeliest:
    """Each row's argmax and its value; NaN if there is one in the row. On a CPU the lowest id wins a tie.

    numpy's argmax over a long row is ten times faster than torch's.
    """
    if logits_NV.device.type != "cpu":
        values_N, ids_N = logits_NV.max(1)
        return ids_N.tolist(), values_N.tolist()
    rows_NV = (logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()).numpy()
    best_N = rows_NV.argmax(1)
    return best_N.tolist(), rows_NV[range(len(best_N)), best_N].tolist()


def _outside_nucleus(p_V: Tensor, top_p: float) -> Tensor:
    """Bool [V]: everything but the smallest set of likeliest tokens whose mass reaches top_p.

    Tokens under (1 - top_p) / V weigh less than 1 - top_p together, so they are outside; only the rest is sorted.
    """
    candidates = torch.nonzero(p_V >= (1 - top_p) / len(p_V) * 0.999).squeeze(1)
    sorted_p, order = p_V[candidates].sort(descending=True, stable=True)
    before = sorted_p.cumsum(0, dtype=torch.float64) - sorted_p
    outside_V = torch.ones_like(p_V, dtype=torch.bool)
    outside_V[candidates[order[before < top_p]]] = False
    return outside_V


def _outside_nucleus_on_cpu(p_V: Array, top_p: float) -> Array:
    candidates = np.flatnonzero(p_V >= (1 - top_p) / len(p_V) * 0.999)
    likely = p_V[candidates]
    if likely.dtype == np.float32:  # as whole numbers, each with its place behind it: that sorts five times as fast
        falling = (~likely.view(np.uint32)).astype(np.uint64) << np.uint64(32)
        order: Array = np.sort(falling | np.arange(len(likely), dtype=np.uint64)) & np.uint64(0xFFFF_FFFF)
    else:
        order = np.argsort(-likely, kind="stable")
    sorted_p = likely[order].astype(np.float64)
    inside = candidates[order[sorted_p.cumsum() - sorted_p < top_p]]
    outside_V = np.ones(len(p_V), np.bool_)
    outside_V[inside] = False
    return outside_V

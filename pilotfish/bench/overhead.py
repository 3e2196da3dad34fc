"""What the engine itself costs: one step's time at batch 1 with the target's pass taken out.

It does not know any model. The one trick: a target that looks its logits up by position, and a drafter that drew its
chains before the clock started, so what is left of a step is planning, laying out, judging and committing. The
drafter's hand-over (its laws gathered into one tensor) counts; the target's lookup does not.

    python -m pilotfish.bench.overhead        the last line is JSON: milliseconds, medians over the steps
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..decoding.draft import Draft, chain
from ..decoding.noise import SeededNoise
from ..decoding.request import Request
from ..decoding.sampling import SamplingParams
from ..drafters.base import Drafter, Setting
from ..engine.engine import Engine
from ..engine.options import EngineOptions
from ..errors import ModelError
from ..models.base import Ends, ModelInfo, ModelOutput
from ..paged.batch import Batch
from ..paged.cache import KVCache, LayerShape

VOCABULARY = 49_152
NUM_DRAFTED = 8
_TAIL = 1.5  # rank ** -1.5: at 49,152 ids some 3,000 are likelier than a millionth, as SmolLM2's median row
PERIOD = 67  # positions with logits of their own; a prime, so that drafts meet them in every phase
WRONG_EVERY = 6  # every so many positions the greedy drafter guesses wrong, so drafts end at all depths


class LookupTarget:
    """A `CausalLM` whose logits after position t are row t mod PERIOD of a table. ``seconds``: spent in passes."""

    def __init__(self, table_PV: Tensor):
        self.table_PV, self.seconds = table_PV, 0.0
        self.info = ModelInfo(
            name="lookup",
            architecture="LookupTarget",
            vocab_size=table_PV.shape[1],
            context=1 << 20,
            layers=(LayerShape(1, 1, 1),),
            hidden_size=1,
            num_bytes=0,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )

    def new_cache(self, num_pages: int, page_size: int = 16) -> KVCache:
        return KVCache(self.info.layers, num_pages, page_size)

    def forward(
        self, batch: Batch, cache: KVCache, *, taps: Sequence[int] = (), layers: Sequence[int] | None = None
    ) -> ModelOutput:
        start = time.perf_counter()
        output = ModelOutput(self.table_PV[batch.positions_T[batch.wanted_N] % len(self.table_PV)])
        self.seconds += time.perf_counter() - start
        return output

    def ends(self) -> Ends:
        raise ModelError("a table of logits has no embedding")


class PreparedDrafter(Drafter):
    """Chains known beforehand: token_of[t] is the guess after position t mod PERIOD; q_PV: the laws it was drawn from,
    None for chosen tokens."""

    def __init__(self, token_of: Sequence[int], q_PV: Tensor | None = None):
        self.token_of, self.q_PV = token_of, q_PV

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        return [self._propose(len(r.tokens) - 1, limit) for r, limit in zip(requests, limits, strict=True)]

    def _propose(self, position: int, limit: int) -> Draft:
        rows = [(position + depth) % PERIOD for depth in range(limit)]
        return chain([self.token_of[row] for row in rows], None if self.q_PV is None else self.q_PV[rows])


def tables(num_tokens: int = VOCABULARY) -> tuple[Tensor, Tensor]:
    """Logits of a made-up target and a draft that mostly agrees with it, [PERIOD, V] each.

    Shaped like real ones: probabilities fall with a power of the rank, and one token more has half of the mass, or
    more, or less. (How long the tail is decides what top_p costs.)
    """
    generator = torch.Generator().manual_seed(0)
    rank_PV = torch.rand(PERIOD, num_tokens, generator=generator).argsort(1) + 1
    peaks_P = 1 + 1.5 * torch.randn(PERIOD, generator=generator)
    ids_P = torch.randint(num_tokens, (PERIOD, 1), generator=generator)
    target_PV = (-_TAIL * rank_PV.log()).scatter(1, ids_P, peaks_P[:, None])
    return target_PV, target_PV + 0.7 * torch.randn(PERIOD, num_tokens, generator=generator)


def greedy_drafter(target_PV: Tensor) -> PreparedDrafter:
    """Right most of the time."""
    guesses = [
        token if (row + 1) % WRONG_EVERY else (token + 1) % target_PV.shape[1]
        for row, token in enumerate(target_PV.argmax(1).tolist())
    ]
    return PreparedDrafter(guesses)


def drawing_drafter(draft_PV: Tensor) -> PreparedDrafter:
    """Tokens drawn from q, and q with them."""
    q_PV = torch.softmax(draft_PV, 1)
    return PreparedDrafter([SeededNoise(1, row).draw(0, q_PV[row]) for row in range(PERIOD)], q_PV)


def median_step_ms(
    target: LookupTarget,
    build_drafter: Callable[[Setting], Drafter],
    params: SamplingParams,
    *,
    num_steps: int,
    num_warmup: int = 20,
) -> float:
    """The median over steps of the time outside the target's passes, in milliseconds."""
    options = EngineOptions(max_model_len=num_steps * (NUM_DRAFTED + 2) + 1024, max_num_seqs=1)
    engine = Engine(target, build_drafter, options, num_speculative_tokens=NUM_DRAFTED)
    engine.add(list(range(1, 33)), params)
    times: list[float] = []
    while engine.has_work and len(times) < num_steps + num_warmup:
        passes, start = target.seconds, time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start - (target.seconds - passes))
    assert len(times) == num_steps + num_warmup, "the request ended early"
    return 1e3 * statistics.median(times[num_warmup:])


def measure(num_steps: int = 300, num_tokens: int = VOCABULARY) -> dict[str, float]:
    """Milliseconds of engine per step, drafting NUM_DRAFTED tokens: greedy; sampling by rejection, at temperature 1;
    the same within top_p 0.95; and coupled, as with a seed."""
    target_PV, draft_PV = tables(num_tokens)
    target = LookupTarget(target_PV)
    most = (num_steps + 20) * (NUM_DRAFTED + 1)
    cases = {
        "greedy_ms": (greedy_drafter(target_PV), SamplingParams(temperature=0, max_tokens=most)),
        "sampling_ms": (drawing_drafter(draft_PV), SamplingParams(max_tokens=most)),
        "top_p_ms": (drawing_drafter(draft_PV), SamplingParams(max_tokens=most, top_p=0.95)),
        "coupled_ms": (greedy_drafter(target_PV), SamplingParams(max_tokens=most, seed=3)),
    }
    return {
        name: round(median_step_ms(target, lambda _setting, d=drafter: d, params, num_steps=num_steps), 4)  # type: ignore[misc]
        for name, (drafter, params) in cases.items()
    }


def main() -> None:
    found = measure()
    wanted = {"greedy_ms": 1.0, "sampling_ms": 3.0}
    print(f"engine time of one step: batch 1, K {NUM_DRAFTED}, {VOCABULARY:,} ids, {torch.get_num_threads()} threads")
    for name, value in found.items():
        bound = f"   (wanted: below {wanted[name]} ms)" if name in wanted else ""
        print(f"  {name.removesuffix('_ms'):10}{value:8.3f} ms{bound}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

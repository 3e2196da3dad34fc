"""Fakes: a model whose law is an exact table, a byte tokenizer, oracles, and the driving of an engine in tests.

They know the protocols of the package; the oracles know neither engine nor cache nor drafts. The one trick:
`TableModel` reads its context back out of the KV cache, through the span's mask, as attention would. A row committed
to the wrong slot, a node that sees its sibling, a position that is off by one: each changes the law or fails an
assertion, and nothing has to be trained.
"""

import itertools
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pilotfish.decoding.noise import race
from pilotfish.decoding.paths import join, split
from pilotfish.decoding.sampling import SamplingParams, process, warp
from pilotfish.drafters.base import Drafter, Setting
from pilotfish.drafters.none import NoDrafter
from pilotfish.engine.engine import Engine, Event
from pilotfish.engine.options import EngineOptions
from pilotfish.models.base import CausalLM, Ends, ModelInfo, ModelOutput
from pilotfish.models.tokenizer import Tokenizer
from pilotfish.paged.batch import Batch, Span
from pilotfish.paged.cache import KVCache, LayerShape


class TableModel:
    """A `CausalLM` with an exact table: the law depends on the last ``order`` tokens and on a phase.

    The phase is a checksum of all visible tokens and their positions, modulo ``num_phases``: 1 gives a plain Markov
    chain, more make every token of the text count. Each layer keeps tokens in its keys and positions in its values,
    and all that run must agree, so a commit that moves one layer and not the other is seen as well. Without some
    layers the table is another, similar one. ``logits_of`` is the same without a cache. poison: tokens behind which
    the logits are NaN.
    """

    def __init__(
        self,
        num_ids: int = 16,
        *,
        order: int = 2,
        num_phases: int = 1,
        seed: int = 0,
        sharpness: float = 1.5,
        eos: Set[int] = frozenset(),
        context: int = 256,
        name: str = "table",
        poison: Set[int] = frozenset(),
    ):
        generator = torch.Generator().manual_seed(seed)
        shape = (num_phases, num_ids**order, num_ids)
        self.table = sharpness * torch.randn(shape, generator=generator, dtype=torch.float64)
        self.noise = 0.5 * sharpness * torch.randn(shape, generator=generator, dtype=torch.float64)
        self.order, self.num_phases, self.poison = order, num_phases, poison
        self.num_passes = self.num_rows = 0
        self.info = ModelInfo(
            name=name,
            architecture="TableModel",
            vocab_size=num_ids,
            context=context,
            layers=(LayerShape(1, 1, 1), LayerShape(1, 1, 2)),
            hidden_size=2,
            num_bytes=self.table.numel() * 8,
            dtype=torch.float64,
            device=torch.device("cpu"),
            eos_ids=frozenset(eos),
        )

    def new_cache(self, num_pages: int, page_size: int = 16) -> KVCache:
        return KVCache(self.info.layers, num_pages, page_size, dtype=torch.float64)

    def ends(self) -> Ends:
        """An embedding by the id's number and its square, no norm, an output matrix of noise."""
        ids_V = torch.arange(self.info.vocab_size).float()
        table_VD = torch.stack([ids_V, ids_V.square()], 1) / self.info.vocab_size
        output_VD = torch.randn(self.info.vocab_size, 2, generator=torch.Generator().manual_seed(1))
        return Ends(table_VD.__getitem__, lambda states_TD: states_TD.float(), output_VD.__getitem__)

    def forward(
        self, batch: Batch, cache: KVCache, *, taps: Sequence[int] = (), layers: Sequence[int] | None = None
    ) -> ModelOutput:
        self.num_passes += 1
        self.num_rows += batch.num_rows
        assert int(batch.tokens_T.min()) >= 0 and int(batch.tokens_T.max()) < self.info.vocab_size, "no such row"
        assert int(batch.positions_T.max()) < self.info.context, "a row beyond the context"
        running = range(len(self.info.layers)) if layers is None else layers
        for layer in running:
            cache.keys[layer][batch.slots_T] = batch.tokens_T[:, None, None].double()
            cache.values[layer][batch.slots_T] = batch.positions_T[:, None, None].double()
        held = [(cache.keys[i][:, 0, 0].tolist(), cache.values[i][:, 0, 0].tolist()) for i in running]
        wanted = iter(batch.wanted_N.tolist())
        row, rows = next(wanted, -1), list[Tensor]()
        for span in batch.spans:
            read = _reader(span, held)
            while span.start <= row < span.stop:
                text = [*self.before(span, cache), *read(row)]
                rows.append(self.logits_of(text, whole=len(running) == len(self.info.layers)))
                row = next(wanted, -1)
        logits_NV = torch.stack(rows) if rows else torch.empty(0, self.info.vocab_size, dtype=torch.float64)
        states_TH = torch.stack([batch.tokens_T, batch.positions_T], 1).double()
        return ModelOutput(logits_NV, dict.fromkeys(taps, states_TH))

    def logits_of(self, text: Sequence[int], *, whole: bool = True) -> Tensor:
        """The logits [V] behind a text. whole: with all layers."""
        if text[-1] in self.poison:
            return torch.full((self.info.vocab_size,), math.nan, dtype=torch.float64)
        phase = 0
        if self.num_phases > 1:
            phase = sum((position + 1) * (token + 1) for position, token in enumerate(text)) % self.num_phases
        place = 0
        for token in [*[0] * self.order, *text][-self.order :]:
            place = place * self.info.vocab_size + token
        return self.table[phase, place] if whole else self.table[phase, place] + self.noise[phase, place]

    def law(self, text: Sequence[int], temperature: float = 1.0) -> Tensor:
        """The exact law [V] of the next token."""
        return torch.softmax(self.logits_of(text) / temperature, 0)

    def before(self, span: Span, cache: KVCache) -> tuple[int, ...]:
        """What stands before a sequence's text, if anything."""
        return ()


class SourcedTable(TableModel):
    """An encoder-decoder: what comes next depends on the whole source too, which turns the table's lines around.

    Its text begins with token 0. ``logits_of`` takes paths, as in `pilotfish.decoding.paths`.
    """

    def __init__(self, num_ids: int = 16, **options: Any):
        super().__init__(num_ids, **options)
        self.info = replace(self.info, source_context=self.info.context, decoder_prompt=(0,))

    def before(self, span: Span, cache: KVCache) -> tuple[int, ...]:
        source = cache.reading(span.feed.sequence, lambda source: source)
        return join(source, ())

    def logits_of(self, text: Sequence[int], *, whole: bool = True) -> Tensor:
        source, tokens = split(text)
        assert source, "a row whose source was lost"
        turn = sum((place + 1) * (token + 1) for place, token in enumerate(source))
        return super().logits_of(tokens, whole=whole).roll(turn % self.info.vocab_size)

    def after(self, source: Sequence[int], text: Sequence[int]) -> Tensor:
        """The logits [V] behind a text written from this source."""
        return self.logits_of(join(source, text))

    def joint_law(self, source: Sequence[int], num_tokens: int) -> dict[tuple[int, ...], float]:
        """The exact law of a text's first tokens together."""
        return joint_law(self, join(source, self.info.decoder_prompt), num_tokens)


def _reader(span: Span, rows: Sequence[tuple[list[float], list[float]]]) -> Callable[[int], list[int]]:
    """A function from a row of the batch to the text it sees in the cache: its visible keys in order of position.

    rows: per layer that ran, the token and the position that lie in each slot.
    """
    slots = span.key_slots
    keys = range(slots.start, slots.stop) if isinstance(slots, slice) else slots.tolist()
    views = [[(int(positions[key]), int(tokens[key])) for key in keys] for tokens, positions in rows]
    mask = span.mask(None)
    mask_RK = [[True] * len(keys)] * (span.stop - span.start) if mask is None else mask.tolist()

    def read(row: int) -> list[int]:
        texts = [sorted(itertools.compress(view, mask_RK[row - span.start])) for view in views]
        assert all(text == texts[0] for text in texts), f"row {row}: the layers saw different texts {texts}"
        assert [position for position, _ in texts[0]] == list(range(len(texts[0]))), f"row {row} sees {texts[0]}"
        return [token for _, token in texts[0]]

    return read


class ByteTokenizer(Tokenizer):
    """Id i is the byte ``first_byte + i``; the last id is a special token without a text."""

    def __init__(self, num_ids: int = 257, first_byte: int = 0):
        self.num_bytes, self.first_byte = num_ids - 1, first_byte
        self.eos = num_ids - 1
        # The properties of the base class would ask Hugging Face.
        self.__dict__["vocabulary"] = {f"byte{first_byte + i}": i for i in range(num_ids - 1)} | {"<eos>": self.eos}
        self.__dict__["spelt"] = frozenset(range(num_ids - 1))
        self.__dict__["byte_tokens"] = frozenset()
        self.__dict__["token_bytes"] = {i: bytes([first_byte + i]) for i in range(num_ids - 1)}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [byte - self.first_byte for byte in text.encode()]

    def text(self, ids: list[int]) -> str:
        return bytes(self.first_byte + token for token in ids).decode(errors="replace")

    def for_grammars(self) -> Any:
        import llguidance

        this = self

        class Wrapped:
            eos_token_id, bos_token_id, special_token_ids = this.eos, None, (this.eos,)
            tokens = (*(bytes([this.first_byte + i]) for i in range(this.num_bytes)), b"<eos>")

            def __call__(self, text: Any) -> list[int]:
                return [byte - this.first_byte for byte in (text.encode() if isinstance(text, str) else text)]

        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Wrapped()))

    def chat(self, messages: Sequence[Any], tools: Sequence[Any] | None = None) -> list[int]:
        names = "".join(f"({tool['function']['name']})" for tool in tools or ())
        return self.encode(names + "".join(f"[{message['role']}]{message['content']}\n" for message in messages))


# -- oracles: the target's own text, from logits alone, without engine, cache or drafts ------------------------------


def choose(
    logits_V: Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Set[int],
    seed: int,
) -> int:
    """What the target says next, at temperature 0 or with a seed."""
    context = (params, prompt, [output], stop_ids)
    if params.greedy:
        return int(process(logits_V[None], *context)[0].argmax())
    return race(seed, len(prompt) + len(output), warp(logits_V[None], *context)[0])


def oracle(
    logits_of: Callable[[Sequence[int]], Tensor],
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    eos: Set[int] = frozenset(),
    max_length: int = 10**9,
) -> tuple[int, ...]:
    """The output tokens of plain decoding. Stop strings are not known here."""
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    output: list[int] = []
    while len(output) < params.max_tokens and len(prompt) + len(output) < max_length:
        logits_V = logits_of([*prompt, *output])
        output.append(choose(logits_V, params, prompt, output, stop_ids, params.seed or 0))
        if output[-1] in stop_ids and len(output) > params.min_tokens:
            break
    return tuple(output)


def joint_law(model: TableModel, prompt: Sequence[int], num_tokens: int) -> dict[tuple[int, ...], float]:
    """The exact law of the next tokens together."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        law = {
            (*text, token): before * p
            for text, before in law.items()
            for token, p in enumerate(model.law([*prompt, *text]).tolist())
        }
    return law


# -- driving an engine -----------------------------------------------------------------------------------------------


def engine(
    model: CausalLM,
    drafter: Drafter | Callable[[Setting], Drafter] | None = None,
    *,
    k: Any = 5,
    rule: Any = "rejection",
    tokenizer: Tokenizer | None = None,
    entropy: Callable[[], int] | None = None,
    **options: Any,
) -> Engine:
    """An engine around a drafter, a function that builds one, or none."""
    if isinstance(drafter, Drafter):
        found = drafter
        build: Callable[[Setting], Drafter] = lambda _setting: found  # noqa: E731
    else:
        build = drafter or (lambda _setting: NoDrafter())
    return Engine(
        model,
        build,
        EngineOptions(**{"block_size": 4} | options),
        tokenizer=tokenizer,
        rule=rule,
        num_speculative_tokens=k,
        entropy=entropy or itertools.count(1).__next__,
    )


def drain(engine: Engine, limit: int = 10_000) -> list[Event]:
    """Step until nothing is left to do, checking every invariant on the way, and that nothing stays behind."""
    events: list[Event] = []
    for _ in range(limit):
        if not engine.has_work:
            break
        events += engine.step()
        engine.scheduler.check()
    assert not engine.has_work, "it does not end"
    assert engine.cache.pool.num_held == 0 and not engine.cache.sequences, "something stayed behind"
    return events


def run(engine: Engine, prompt: Sequence[int], params: SamplingParams, **more: Any) -> tuple[int, ...]:
    """One request alone, to its end: its output tokens."""
    (request,) = engine.add(prompt, params, **more)
    drain(engine)
    return tuple(request.output)

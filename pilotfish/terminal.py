"""What people see in a terminal: a stream of text with drafted tokens in colour, and the side-by-side demo.

It does not know how text is made. The one trick: colour marks origin only, so piped output is the plain text.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import click

from .decoding.sampling import SamplingParams
from .llm import LLM, Chunk, Completion
from .models.load import LoadOptions, load

DRAFTED = "cyan"

# Text with something to copy from, as in editing, summarising and question answering over a passage.
DEMO_PROMPT = """Correct the spelling mistakes in this text and repeat it:

The pilot fish swims ahead of the shark. People onec thought that it leads the shark to its food. In truth the pilot \
fish eats what the shark leaves over, and it cleans the shark's skin of parasites. The shark lets it swim, and the \
pilot fish is safe from other fish as long as it swims ahead of the shark."""


def show(chunks: Iterator[Chunk], pieces: list[str] | None = None, llm: LLM | None = None) -> bool:
    """Print a stream as it comes, then one line about it to stderr; True if Ctrl-C cut it short.

    pieces: filled with the text shown, if given. llm: where it comes from, for what drafting gains.
    """
    pieces = [] if pieces is None else pieces
    coloured = sys.stdout.isatty()
    started, num_tokens, first = time.perf_counter(), 0, 0.0
    completion: Completion | None = None
    try:
        for chunk in chunks:
            first = first or time.perf_counter()
            num_tokens += len(chunk.token_ids)
            for i, piece in enumerate(chunk.pieces):
                pieces.append(piece)
                drafted = coloured and i < chunk.num_accepted
                click.echo(click.style(piece, fg=DRAFTED) if drafted else piece, nl=False)
            sys.stdout.flush()
            completion = chunk.completion or completion
    except KeyboardInterrupt:
        pass  # what is there is shown, with its finish reason
    click.echo()
    seconds = time.perf_counter() - (first or started)
    gain = llm.predicted_gain if llm else None
    click.echo(_summary(completion, num_tokens, seconds, gain), err=True)
    return completion is None


def _summary(completion: Completion | None, num_tokens: int, seconds: float, gain: float | None) -> str:
    speed = f"{(num_tokens - 1) / seconds:.1f} tokens/s" if num_tokens > 1 and seconds > 0 else "no speed to tell"
    if completion is None:
        return f"[{num_tokens} tokens, {speed}; finish reason: abort (interrupted)]"
    block = completion.speculative_decoding
    drafting = f", mean acceptance length {block['mean_acceptance_length']:.2f}" if block["num_spec_steps"] else ""
    drafting += f", predicted gain {gain:.2f} x" if gain is not None else ""
    return f"[{num_tokens} tokens, {speed}{drafting}; finish reason: {completion.finish_reason}]"


def side_by_side(model: str, max_tokens: int, options: Mapping[str, Any]) -> bool:
    """The demo: the same prompt plainly and with n-gram drafting; True if the texts are identical."""
    own = {field.name for field in fields(LoadOptions)}
    loaded = load(model, **{name: value for name, value in options.items() if name in own})
    rest = {name: value for name, value in options.items() if name not in own}
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    click.echo(f"> {DEMO_PROMPT}\n")
    results: list[tuple[str, float, Completion]] = []
    for title, config in (("plain decoding", {}), ("with drafting", {"method": "ngram"})):
        llm = LLM.from_model(loaded, speculative_config=config, **rest)
        click.secho(f"-- {title}: {llm.describe()}", bold=True)
        prompt = llm.chat_prompt([{"role": "user", "content": DEMO_PROMPT}])
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4))  # warm up: page in the weights
        llm.engine.cache.pool.forget_all()
        started, last = time.perf_counter(), None
        for chunk in llm.stream(prompt, params):
            if last is None:
                started = time.perf_counter()  # the speed is that of decoding; reading the prompt is not counted
            for i, piece in enumerate(chunk.pieces):
                click.secho(piece, fg=DRAFTED if i < chunk.num_accepted else None, nl=False)
            sys.stdout.flush()
            last = chunk
        assert last is not None and last.completion is not None
        seconds = time.perf_counter() - started
        results.append((title, (len(last.completion.token_ids) - 1) / seconds, last.completion))
        click.echo("\n")
    (_, slow, plain), (_, fast, drafted) = results
    length = drafted.speculative_decoding["mean_acceptance_length"]
    identical = plain.token_ids == drafted.token_ids
    click.echo(f"plain decoding   {slow:6.1f} tokens/s")
    click.echo(f"with drafting    {fast:6.1f} tokens/s   {fast / slow:.2f} x")
    click.echo(f"mean acceptance length {length:.2f} (tokens per pass that had a draft)")
    click.echo(f"texts identical: {'yes' if identical else 'NO'}")
    return identical

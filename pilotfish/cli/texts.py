"""generate, explain, chat, demo: commands that write text.

It does not know how text is made or shown.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import click

from .. import flags
from ..decoding.sampling import SamplingParams
from ..drafters import registry
from ..errors import OptionError
from .common import drafting_flags, load_llm, model_flags, sampling_flags, sampling_params, speculative_config
from .group import main

_EXPLAIN_DEFAULTS = {"temperature": 0.8, "max_tokens": 32}  # so that there are coins to see, on one page

_trace_flag = click.option("--trace", metavar="FILE", help="write a record of each pass into this JSONL file")


@main.command()
@click.argument("prompt", required=False)
@click.option("-f", "--file", type=click.File("r", encoding="utf-8"), help="read the prompt from a file (- is stdin)")
@click.option("--raw", is_flag=True, help="do not put the prompt into the model's chat format")
@click.option("--reference", type=click.File("r", encoding="utf-8"), help="a text the answer will resemble")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object instead of the text")
@_trace_flag
@model_flags
@drafting_flags()
@sampling_flags()
def generate(
    prompt: str | None,
    file: Any,
    raw: bool,
    reference: Any,
    as_json: bool,
    trace: str | None,
    model: str,
    **values: Any,
) -> None:
    """Complete PROMPT, streaming.

    On a terminal, tokens that were drafted and accepted are coloured.
    """
    if (prompt is None) == (file is None):
        raise OptionError("give either PROMPT or --file")
    text = prompt if file is None else _read_text(file)
    params = sampling_params(values)
    with _traced(trace) as listen:
        llm = load_llm(model, values)
        listen(llm)
        ids = _asked(llm, str(text), raw)
        hint = _read_text(reference) if reference else None
        if as_json or params.n > 1:
            _print_json(llm, ids, params, hint)
            return
        from ..terminal import show

        interrupted = show(llm.stream(ids, params, reference=hint), llm=llm)
    if interrupted:
        raise SystemExit(130)


@main.command()
@click.argument("prompt")
@click.option("--raw", is_flag=True, help="do not put the prompt into the model's chat format")
@click.option("--html", metavar="FILE", help="also write the story as one page that needs nothing else")
@_trace_flag
@model_flags
@drafting_flags()
@sampling_flags(_EXPLAIN_DEFAULTS)
def explain(prompt: str, raw: bool, html: str | None, trace: str | None, model: str, **values: Any) -> None:
    """Show how speculative decoding works, on PROMPT.

    Each pass of a real run: what was guessed, p and q, the coin, what was kept, and where the other token came from.
    Drafts with layers of the model itself unless told otherwise; the same command tells the same story again.
    """
    from ..explain.run import DEFAULTS, run_explain

    params = sampling_params(values, _EXPLAIN_DEFAULTS)
    config = registry.resolve_aliases(speculative_config(values))
    if "method" not in config and "model" not in config:
        config = DEFAULTS | config
    llm = load_llm(model, values, {"num_speculative_tokens": DEFAULTS["num_speculative_tokens"]} | config)
    about = {"prompt": prompt, "model": llm.describe()}
    run_explain(llm, _asked(llm, prompt, raw), params, about, html=html, trace=trace)


def _asked(llm: Any, text: str, raw: bool) -> Any:
    """A prompt as the model's chat format has it, if there is one."""
    if raw or llm.tokenizer is None or not llm.tokenizer.hf.chat_template:
        return text
    return llm.chat_prompt([{"role": "user", "content": text}])


@contextlib.contextmanager
def _traced(path: str | None) -> Iterator[Callable[[Any], None]]:
    """What has an LLM's passes written into this file, which is opened now, before a model is loaded."""
    if path is None:
        yield lambda _llm: None
        return
    from ..trace import TraceFile, listen

    with TraceFile(path) as file:
        yield lambda llm: listen(llm.engine, llm.tokenizer, file.write)


@main.command()
@click.option("--system", help="a system message")
@model_flags
@drafting_flags()
@sampling_flags()
def chat(system: str | None, model: str, **values: Any) -> None:
    """Talk to the model.

    An empty line or Ctrl-D ends the talk, Ctrl-C cuts an answer short.
    """
    from ..terminal import show

    params = sampling_params(values)
    llm = load_llm(model, values)
    if sys.stdin.isatty():
        click.echo("an empty line or Ctrl-D ends the talk, Ctrl-C cuts an answer short", err=True)
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    for line in _lines():
        messages.append({"role": "user", "content": line})
        pieces: list[str] = []
        show(llm.stream(llm.chat_prompt(messages), params), pieces, llm)
        messages.append({"role": "assistant", "content": "".join(pieces)})


@main.command()
@model_flags
@click.option("--max-tokens", default=96, show_default=True, help="new tokens of each run")
def demo(model: str, max_tokens: int, **values: Any) -> None:
    """Show decoding with and without drafting.

    Ends with both speeds, the mean acceptance length, and whether the texts agree.
    """
    from ..terminal import side_by_side

    if not side_by_side(model, max_tokens, flags.given(values)):
        raise SystemExit(1)


def _read_text(file: Any) -> str:
    try:
        return str(file.read())
    except UnicodeDecodeError as error:
        raise OptionError(f"{file.name} is not a text in UTF-8: {error}") from error


def _print_json(llm: Any, prompt: Any, params: SamplingParams, reference: str | None) -> None:
    from ..llm import Interrupted

    try:
        completions, status = llm.generate([prompt], params, references=[reference]), 0
    except Interrupted as interrupt:
        completions, status = interrupt.completions, 130
    for one in completions:
        click.echo(json.dumps(asdict(one), ensure_ascii=False))
    if status:
        raise SystemExit(status)


def _lines() -> Iterator[str]:
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if not line:
            return
        yield line

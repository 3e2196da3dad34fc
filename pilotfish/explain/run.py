"""`run_explain`: one prompt, decoded by the very loop that serves, told as it goes.

It does not know what is told. The one trick: the noise is fixed, so the same command tells the same story again.
"""

import contextlib
import itertools
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from ..decoding.sampling import SamplingParams
from ..errors import OptionError
from ..llm import LLM, Prompt
from ..trace import Json, TraceFile, listen
from .page import write_page
from .terminal import Story

# What drafts if nothing is said: it needs no second model, and at temperatures above 0 its guesses have a q.
DEFAULTS = {"method": "layer_skip", "num_speculative_tokens": 4}


def run_explain(
    llm: LLM,
    prompt: Prompt,
    params: SamplingParams,
    about: Mapping[str, str],
    *,
    html: str | None = None,
    trace: str | None = None,
    console: Console | None = None,
) -> list[Json]:
    """Decode and tell; returns the records. about: as for `write_page`. Ctrl-C ends the story where it is, and is
    raised again once that is told.

    Raises OptionError for files that cannot be written and for several completions.
    """
    if params.n != 1:
        raise OptionError(f"explain tells of one completion, and n is {params.n}")
    if html is not None:
        page = Path(html).expanduser().absolute()
        if not page.parent.is_dir() or page.is_dir():
            reason = "it is a folder" if page.is_dir() else "there is no such folder"
            raise OptionError(f"the page cannot be written to {html!r}: {reason}")
    story, records = Story(console or Console()), list[Json]()
    llm.engine.entropy = itertools.count(1).__next__
    with TraceFile(trace) if trace is not None else contextlib.nullcontext() as file:

        def take(one: Json) -> None:
            records.append(one)
            story.tell(one)
            if file is not None:
                file.write(one)

        listen(llm.engine, llm.tokenizer, take)
        text, interrupt = "", None
        try:
            for chunk in llm.stream(prompt, params):
                text += chunk.text
        except KeyboardInterrupt as error:
            interrupt = error
    story.end(text)
    if html is not None:
        write_page(html, records, about)
    if interrupt is not None:
        raise interrupt
    return records

"""``python -m pilotfish.bench.serving``: start a server, try it, print a table and what was broken."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import click

from ...errors import PilotfishError, UserError
from ...flags import from_fields, pick
from ..prompts import read_prompts
from .options import ServingOptions
from .trials import Findings, load, overhead, stubborn, vanishing

_TRIALS = {"load": load, "vanish": vanishing, "stubborn": stubborn, "overhead": overhead}


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@from_fields(ServingOptions)
def main(**values: object) -> None:
    """Try what the server promises.

    Load, clients that vanish or dawdle, and what HTTP costs. A table for each, and one JSON document as the last line;
    the exit status is 1 if a promise was broken.
    """
    try:
        options = pick(ServingOptions, values)
        prompts = read_prompts(options.prompts)
    except PilotfishError as error:
        click.echo(f"pilotfish: {error}", err=True)
        sys.exit(2 if isinstance(error, UserError) else 1)
    results = {}
    with hosting(options) as port:
        for name in options.chosen:
            started = time.perf_counter()
            results[name] = asyncio.run(_TRIALS[name](port, prompts, options))
            show(name, results[name], time.perf_counter() - started)
    click.echo(json.dumps({name: {"rows": one.rows, "broken": one.broken} for name, one in results.items()}))
    sys.exit(1 if any(one.broken for one in results.values()) else 0)


@contextlib.contextmanager
def hosting(options: ServingOptions) -> Iterator[int]:
    """The port of a server in a process of its own, which is ended afterwards as a user would."""
    command = [sys.executable, "-m", f"{__package__}.host", json.dumps(options.arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.strip().isdigit():
                sys.exit(process.wait() or 1)
            yield int(line)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def show(name: str, findings: Findings, seconds: float) -> None:
    """A trial's table."""
    click.echo(f"{name} ({seconds:.0f} s)")
    for row, value in findings.rows.items():
        click.echo(f"  {row:45}{value}")
    click.echo("\n".join(f"  BROKEN: {told}" for told in findings.broken) or "  all as promised")


if __name__ == "__main__":
    main()

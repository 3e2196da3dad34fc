"""``python -m pilotfish.bench.peers``: measure other engines beside ours."""

import signal
import sys

import click

from ...errors import PilotfishError, UserError
from ...flags import from_fields, pick
from ..environment import cpu_model
from .engines import table
from .options import PeersOptions
from .picture import draw
from .report import print_report, rows_of
from .run import run_peers
from .task import prepare_task


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@from_fields(PeersOptions)
def main(**values: object) -> None:
    """Measure other engines beside pilotfish.

    Installs them into environments of their own, converts the model for each once, and lets all take turns on the same
    prompts. A table, and one JSON document as the last line. Interrupted, the same command goes on.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or workers would go on without us
    try:
        options = pick(PeersOptions, {("engines" if name == "engine" else name): v for name, v in values.items()})
        engines, task = table(options), prepare_task(options)
        outcome = run_peers(task)
        rows = rows_of(outcome.journal.runs, outcome.journal.loads, task.stop_ids)
        print_report(task, outcome, rows, engines)
        if options.plot and rows:
            draw(
                rows,
                f"{task.model.name} on {cpu_model()}, {options.num_threads} threads, greedy, batch 1",
                options.plot,
            )
    except PilotfishError as error:
        click.echo(f"pilotfish: {error}", err=True)
        sys.exit(2 if isinstance(error, UserError) else 1)
    sys.exit(130 if outcome.interrupted else 0 if rows else 1)


if __name__ == "__main__":
    main()

"""``python -m pilotfish.reproduce``: measure the paper's tables, and write the report."""

import sys

import click

from ..errors import PilotfishError, UserError
from ..flags import from_fields, pick
from .options import ReproduceOptions
from .run import run


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@from_fields(ReproduceOptions)
def main(**values: object) -> None:
    """Measure the paper's tables on models that run here.

    Without a pair of your own (--model, --draft-model): the demo model with what drafts for it, and an encoder-decoder
    pair that is trained first. A page, a picture and every number go into a folder. Interrupted, the same command goes
    on.
    """
    try:
        page, interrupted = run(pick(ReproduceOptions, values))
    except PilotfishError as error:
        click.echo(f"pilotfish: {error}", err=True)
        sys.exit(2 if isinstance(error, UserError) else 1)
    click.echo(str(page))
    sys.exit(130 if interrupted else 0)


if __name__ == "__main__":
    main()

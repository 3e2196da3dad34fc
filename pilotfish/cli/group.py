"""The group of all commands, and the one door through which every error leaves: one line, and an exit status.

It does not know any command: each file of commands adds its own.
"""

import os
import sys
from typing import Any

import click

from ..errors import PilotfishError, UserError


class _Commands(click.Group):
    """Turns our errors into one line and an exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            click.echo(f"pilotfish: {error}", err=True)
            ctx.exit(2)
        except PilotfishError as error:
            click.echo(f"pilotfish: {error}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:  # while modules or weights are loaded: there is nothing to show yet
            ctx.exit(130)
        except BrokenPipeError:  # the reader of our output left
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(141)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="pilotfish")
def main() -> None:
    """Lossless speculative decoding: the target model's own text, several tokens per pass."""

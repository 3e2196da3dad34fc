"""More than one machine: the same server in replicas on Ray Serve, and the same batch on Ray Data.

It does not know how a text is made, and schedules nothing: where replicas run, when there are more of them and what
becomes of dead ones is Ray's business. The one trick: what is ours (where a conversation goes, what a client hears
when a replica dies) is plain asyncio in `front`, `replica` and `routing`; only the other modules import Ray.
"""

from typing import Any


def build(args: dict[str, Any]) -> Any:
    """An application for ``serve run pilotfish.scale:build model=demo replicas=2`` and Serve's config files.

    args: options of `LLM`, `ServeOptions` and `ScaleOptions` by name; host and port are left to Serve's own options.
    Raises OptionError for what is unknown or out of range.
    """
    from .deploy import application
    from .recipe import read

    return application(*read(args))


__all__ = ["build"]

"""What Ray reads from the environment while it is imported; to be said before.

It does not import Ray. The one trick: a cluster of our own takes this machine's loopback address, as Ray does on
systems where firewalls ask, and asks for Ray's token, so that nobody else can use any part of it.
"""

import os

from .options import ScaleOptions


def prepare(scale: ScaleOptions) -> None:
    """Report nothing to anybody; and, where no cluster is named, be reached from nowhere else."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address(scale) == "local":
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # for the port of each replica, which Serve opens to all


def address(scale: ScaleOptions) -> str:
    """Of the cluster; ``local``: one of our own."""
    return scale.ray_address or os.environ.get("RAY_ADDRESS") or "local"

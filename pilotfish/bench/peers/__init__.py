"""Other engines beside ours: the same prompts, in turns, in one run. ``python -m pilotfish.bench.peers``.

The driver does not know any engine: `engines` is the table of them, `workers` holds one script for each, which runs
under that engine's own interpreter. The one trick: every engine is a process that waits while another one works, so
what else the machine does falls on all alike.
"""

from .options import PeersOptions

__all__ = ["PeersOptions"]

"""Where a conversation goes: a name for it, and an order of the replicas for each name.

It does not know Ray or HTTP. The one trick: rendezvous hashing. Whoever asks finds the same replica for the same
beginning of a conversation, with nothing remembered or told to anybody; when a replica comes or goes, only the
conversations that were (or now are) at home there move.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic_core import from_json, to_json

Name = TypeVar("Name")
_NUM_CHARACTERS = 256  # of a plain prompt: its beginning is what later ones share with it
_NUM_IDS = 64


def conversation(path: str, body: bytes) -> str | None:
    """A name that all turns of a conversation share: a hash of what its prompts begin with. None: there is none.

    A chat's is all up to the first message of the user, with the tools, which templates put before it. Two that share
    a system message only are two: one popular system message would else send everybody to one replica.
    """
    try:
        asked: Any = from_json(body)
    except ValueError:
        return None
    if not isinstance(asked, dict):
        return None
    if path == "/v1/chat/completions":
        beginning = _opening(asked.get("messages"))
        beginning = beginning and [asked.get("tools"), beginning]
    elif path == "/v1/completions":
        beginning = _start(asked.get("prompt"))
    else:
        return None
    return hashlib.blake2b(to_json(beginning), digest_size=16).hexdigest() if beginning else None


def _opening(messages: Any) -> list[Any]:
    if not isinstance(messages, list):
        return []
    for i, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            return messages[: i + 1]
    return messages


def _start(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return prompt[:_NUM_CHARACTERS]
    if isinstance(prompt, list) and prompt:
        return prompt[:_NUM_IDS] if isinstance(prompt[0], int) else _start(prompt[0])
    return None


def home(name: str, replicas: Iterable[Name]) -> Name:
    """The replica that a conversation belongs to, whoever asks. replicas: at least one, told apart by their texts."""
    return max(replicas, key=lambda replica: hashlib.blake2b(f"{name} {replica}".encode()).digest())


def refuges(loads: Mapping[Name, int | None], own: Name, num_seats: int) -> list[Name]:
    """Where a request goes instead, if it would wait at home: wherever it waits less, or nobody knows.

    loads: requests at each replica, home among them; None: unknown, so it must be asked. What waits in an engine waits
    there to the end, so queues of one length are worth more than a prefix.
    """
    at_home = loads[own]
    if at_home is None or at_home < num_seats:
        return []
    return [name for name, load in loads.items() if name != own and (load is None or load < at_home)]

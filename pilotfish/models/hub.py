"""Whether a model can be had from the hub: one question, before anything is fetched.

It does not know models. The one trick: the libraries that fetch ask again and again, file by file, for half a minute
each, with a warning each time; so the first question is ours, and no answer to it ends in one line with the way out.
"""

from collections.abc import Callable

from ..errors import ModelError

_PATIENCE = 10.0  # seconds
_WAY_OUT = "give a model's folder, a GGUF file or 'demo', or fetch it where there is a network"


def look_up(name: str, say: Callable[[str], None]) -> None:
    """Raises ModelError if a model was never fetched and the hub cannot be reached. If it was, what is in the cache is
    the libraries' affair: then only the way to spare them the asking is said."""
    from huggingface_hub import constants, get_session, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:  # not an id at all, of which transformers says why
        return
    nowhere = f"there is no folder {name!r} here, it was never fetched from the hub"
    if constants.is_offline_mode():
        if not cached:
            raise ModelError(f"{nowhere}, and HF_HUB_OFFLINE forbids to ask it; {_WAY_OUT}")
        return
    try:
        get_session().head(hf_hub_url(name, "config.json"), timeout=_PATIENCE)
    except Exception as error:  # of whichever HTTP library the hub's client is made with
        unreachable = f"{constants.ENDPOINT} cannot be reached ({type(error).__name__}: {error})"
        if not cached:
            raise ModelError(f"{nowhere}, and {unreachable}; {_WAY_OUT}") from error
        say(f"{unreachable}; HF_HUB_OFFLINE=1 takes what was fetched before, at once")

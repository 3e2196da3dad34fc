"""Reading a request's body, within bounds of size and time.

It does not know what a body means. The one trick: what is announced too large is refused unread, and what turns out to
be is given up at the byte that is too many.
"""

import asyncio
import contextlib

from starlette.requests import Request

from .options import ServeOptions
from .refusals import Refusal


async def read_body(request: Request, options: ServeOptions) -> bytes:
    """All of it. Raises Refusal: 413 for too much, 408 for too slow; ClientDisconnect if the client goes."""
    most = options.max_body_size
    too_large = Refusal(413, f"the request is larger than the {most} bytes that this server takes")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > most:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(options.read_timeout), contextlib.aclosing(request.stream()) as stream:
            async for part in stream:
                size += len(part)
                if size > most:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise Refusal(408, f"the request took longer than {options.read_timeout:g} s to arrive") from None
    return b"".join(parts)

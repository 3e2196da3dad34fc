"""Why a request is not served, as OpenAI clients expect to hear it.

It does not know routes. The one trick: a refusal carries its whole answer (status, code, headers), so whoever finds
the fault says everything about it, and one handler turns all of them into bytes.
"""

from typing import Any

from ..decoding.sampling import PARAM_NAMES
from ..errors import PilotfishError, UserError

Json = dict[str, Any]


class Refusal(PilotfishError):  # noqa: N818 - it is an answer
    """status: of the HTTP answer. param: the request's field that is to blame. code: OpenAI's word for it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}

    @property
    def body(self) -> Json:
        """The answer's JSON, which is also the error event of a stream."""
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        known = kind.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": known, "param": self.param, "code": self.code}}


def of_user_error(error: UserError) -> Refusal:
    """What the core refused; its message begins with the parameter it is about, if it is about one."""
    text = str(error)
    name = text.partition(" ")[0]
    too_long = "shorten the prompt" in text or "lower max_tokens" in text
    return Refusal(
        400, text, param=name if name in PARAM_NAMES else None, code="context_length_exceeded" if too_long else None
    )

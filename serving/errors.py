"""Why a request gets no answer, in one line, without paths or names of this machine."""

from __future__ import annotations

from collections.abc import Mapping


class RequestRefused(Exception):
    """A request that is not answered. status: the HTTP status, 4xx, 503 while starting, 500 for a defect."""

    def __init__(self, status: int, why: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(why)
        self.status, self.why, self.headers = status, why, dict(headers or {})


def overloaded(why: str, retry_after_s: float) -> RequestRefused:
    """429, with the time after which to try again."""
    return RequestRefused(429, why, {"retry-after": str(max(1, round(retry_after_s)))})

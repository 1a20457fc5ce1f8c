"""The page to try a model with: one file that asks for nothing outside, and may do nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.responses import Response

_FILE = Path(__file__).parent / "templates" / "page.html"


def page() -> Response:
    """The page, the same for all; it learns from /openapi.json what can be asked, with a token if need be."""
    html, headers = _page()
    return Response(html, headers=headers, media_type="text/html")


@cache
def _page() -> tuple[str, dict[str, str]]:
    html = _FILE.read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _digests(html, "script"),
        "style-src": _digests(html, "style"),
        "connect-src": "'self'",
        "img-src": "blob: data:",  # the picture that was chosen; an empty icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "content-security-policy": "; ".join(f"{name} {allowed}" for name, allowed in policy.items()),
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }
    return html, headers


def _digests(html: str, element: str) -> str:
    """What the policy calls the inline elements of a name, by their contents."""
    contents = re.findall(f"<{element}>(.*?)</{element}>", html, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in contents)
    return " ".join(f"'sha256-{one}'" for one in digests)

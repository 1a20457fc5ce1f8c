"""Taking credentials out of what is shown or written down."""

from __future__ import annotations

import re

_USER_INFO = re.compile(r"([a-z][a-z0-9+.-]*://)[^/?#\s'\"]*@", re.IGNORECASE)
_SECRET_QUERY = re.compile(
    r"([?&;](?:x-(?:amz|goog)-[a-z-]+|sig|signature|[a-z_-]*(?:token|password|key|secret))=)[^&\s'\"]+",
    re.IGNORECASE,
)


def without_credentials(text: str) -> str:
    """`text` with user names, passwords and signatures taken out of every URI in it."""
    return _SECRET_QUERY.sub(r"\1***", _USER_INFO.sub(r"\1", text))

"""What the versions in a model registry refer to. Does not import mlflow before it is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpml.io import tracking

DIGEST_TAG, MEASUREMENTS_TAG = "hpml.engine_digest", "hpml.measurements_digest"
FILE_TAG = "hpml.file_sha256"  # of what the runtime opens
_PAGE = 1000


@dataclass(frozen=True)
class References:
    """The content digests that a version names; empty where it does not."""

    engine_digest: str
    measurements_digest: str


def references(uri: str) -> list[References]:
    """What each version that we registered in the registry at `uri` refers to.

    Raises Unavailable if it does not answer.
    """
    tracking.ensure_store(uri)
    tags: list[dict[str, str]] = []
    page: Any = None
    with tracking.reaching(uri):
        client = tracking.client(uri)
        while page is None or page.token:
            page = client.search_model_versions(max_results=_PAGE, page_token=page and page.token)
            tags += [version.tags for version in page if DIGEST_TAG in version.tags]
    return [References(of_one[DIGEST_TAG], of_one.get(MEASUREMENTS_TAG, "")) for of_one in tags]

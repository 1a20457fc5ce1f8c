"""Bring a bundle to where a server can open it: what the init container of a deployment runs.

`python -m hpml.serving.rollout.fetch URI FOLDER DIGEST` downloads the bundle at URI (S3, with the credentials
of the environment) into FOLDER, or finds it where URI is a path, and compares it with DIGEST, file by file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hpml.artifacts.folder import open_artifact
from hpml.core.errors import UsageError, explained
from hpml.io import storage


def fetch(uri: str, folder: Path, digest: str) -> Path:
    """Where the bundle at `uri` is now: in `folder`, or at `uri` itself if that is a path.

    Raises StageFailed if it is not there, damaged, or another than the one of `digest`; Unavailable.
    """
    found = storage.fetch(uri, folder)
    open_artifact(found, kind="bundle", digest=digest)
    return found


def main(arguments: Sequence[str]) -> None:
    """The command of an init container."""
    with explained():
        if len(arguments) != 3:
            raise UsageError("python -m hpml.serving.rollout.fetch takes URI FOLDER DIGEST")
        uri, folder, digest = arguments
        print(f"{uri} is whole in {fetch(uri, Path(folder), digest)}")


if __name__ == "__main__":
    main(sys.argv[1:])

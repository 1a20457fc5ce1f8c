"""Bring a bundle to where a server can open it: what the init containers of a deployment run.

`python -m hpml.serving.rollout.fetch URI FOLDER DIGEST` downloads the bundle at URI (S3, with the credentials
of the environment) into FOLDER, or finds it where URI is a path, and compares it with DIGEST, file by file.
With `--file URI FILE SHA256` it is one file in S3, such as recorded requests.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from hashlib import file_digest
from pathlib import Path

from hpml.artifacts.folder import open_artifact
from hpml.core.errors import StageFailed, UsageError, explained
from hpml.io import storage


def fetch(uri: str, folder: Path, digest: str) -> Path:
    """Where the bundle at `uri` is now: in `folder`, or at `uri` itself if that is a path.

    Raises StageFailed if it is not there, damaged, or another than the one of `digest`; Unavailable.
    """
    found = storage.fetch(uri, folder)
    open_artifact(found, kind="bundle", digest=digest)
    return found


def fetch_file(uri: str, file: Path, digest: str) -> None:
    """Download one. Raises StageFailed if it is not there, or not the one of `digest`; Unavailable."""
    storage.fetch_file(uri, file)
    with file.open("rb") as content:
        if file_digest(content, "sha256").hexdigest() != digest:
            raise StageFailed(f"{uri} was changed", why="its SHA-256 is another", fix="deploy again")


def main(arguments: Sequence[str]) -> None:
    """The command of an init container."""
    with explained():
        match arguments:
            case ["--file", uri, file, digest]:
                fetch_file(uri, Path(file), digest)
            case [uri, folder, digest]:
                print(f"{uri} is whole in {fetch(uri, Path(folder), digest)}")
            case _:
                raise UsageError("python -m hpml.serving.rollout.fetch takes [--file] URI PLACE DIGEST")


if __name__ == "__main__":
    main(sys.argv[1:])

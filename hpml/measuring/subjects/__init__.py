"""What can be measured. A subject is one file here and one row of SUBJECTS.

A worker gets the subject's config and opens it in its own process. Importing this imports neither torch
nor another runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Discriminator

from hpml.measuring.subjects.base import Opened, Subject
from hpml.measuring.subjects.bundle import BundleSubject
from hpml.measuring.subjects.engine import EngineSubject
from hpml.measuring.subjects.onnx import OnnxSubject
from hpml.measuring.subjects.server import ServerSubject
from hpml.measuring.subjects.torch import TorchSubject

SUBJECTS: dict[str, type[Subject]] = {
    "engine": EngineSubject,
    "bundle": BundleSubject,
    "onnx": OnnxSubject,
    "torch": TorchSubject,
    "server": ServerSubject,
}

if TYPE_CHECKING:
    AnySubject = Subject
else:
    AnySubject = Annotated[
        Union[tuple(SUBJECTS.values())],  # noqa: UP007
        Discriminator("subject"),
    ]

__all__ = [
    "SUBJECTS",
    "AnySubject",
    "BundleSubject",
    "EngineSubject",
    "OnnxSubject",
    "Opened",
    "ServerSubject",
    "Subject",
    "TorchSubject",
]

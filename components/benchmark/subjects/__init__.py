"""What can be measured. A subject is one file here and one row of SUBJECTS.

A worker gets the subject's config and opens it in its own process. Importing this package wakes neither torch
nor another runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Discriminator

from components.benchmark.subjects.base import Opened, Subject
from components.benchmark.subjects.bundle import BundleSubject
from components.benchmark.subjects.engine import EngineSubject
from components.benchmark.subjects.onnx import OnnxSubject
from components.benchmark.subjects.server import ServerSubject
from components.benchmark.subjects.torch import TorchSubject

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

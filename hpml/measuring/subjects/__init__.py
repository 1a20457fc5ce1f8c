"""What can be measured. A subject is one file here and one name in AnySubject.

A worker gets the subject's config and opens it in its own process. Importing this imports neither torch
nor another runtime.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator

from hpml.measuring.subjects.base import Opened, Subject
from hpml.measuring.subjects.bundle import BundleSubject
from hpml.measuring.subjects.engine import EngineSubject
from hpml.measuring.subjects.onnx import OnnxSubject
from hpml.measuring.subjects.server import ServerSubject
from hpml.measuring.subjects.torch import TorchSubject

AnySubject = Annotated[
    EngineSubject | BundleSubject | OnnxSubject | TorchSubject | ServerSubject, Discriminator("subject")
]

__all__ = [
    "AnySubject",
    "BundleSubject",
    "EngineSubject",
    "OnnxSubject",
    "Opened",
    "ServerSubject",
    "Subject",
    "TorchSubject",
]

"""How a server is asked in the words of a task, beside named arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Endpoint:
    """One path under which the first operation is asked.

    path: such as "/v1/classify". content_types: what a body may be. feeds: the inputs, rows in front, that a
    body stands for; raises ValueError with the reason in one line. answer: what a client is told of the
    outputs.
    """

    path: str
    content_types: tuple[str, ...]
    feeds: Callable[[bytes], Mapping[str, NDArray[Any]]]
    answer: Callable[[Mapping[str, NDArray[Any]]], JsonValue]

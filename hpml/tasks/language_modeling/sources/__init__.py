"""The sources of texts for language models. A source is one file here and one row of SOURCES."""

from __future__ import annotations

from hpml.tasks.language_modeling.sources.base import TextSource
from hpml.tasks.language_modeling.sources.chitchat import Chitchat
from hpml.tasks.language_modeling.sources.text import Text

SOURCES: dict[str, type[TextSource]] = {
    "chitchat": Chitchat,
    "text": Text,
}

__all__ = ["SOURCES", "TextSource"]

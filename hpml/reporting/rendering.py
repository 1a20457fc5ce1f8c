"""HTML pages by Jinja2 templates: whatever a template shows is escaped, pictures when they are written."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import Element, tostring

import hpml
from hpml.reporting import core_distances, costs, format, measurement_tables, over_time, peaks
from hpml.reporting.svg import HALF_PX, NARROW_PX, WIDE_PX

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


def render(template: str, **values: Any) -> str:
    """The text of `template`, which is named by its path below the package hpml."""
    return _environment().get_template(template).render(values)


def macros(template: str, **values: Any) -> Any:
    """The macros of `template` as functions that return markup; they see `values`."""
    return _environment().get_template(template).make_module(values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(hpml.__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = (format.duration, format.megabytes, format.percent, format.plain, format.sentence, breakable)
    environment.filters |= {show.__name__: show for show in shown}
    known = (core_distances, costs, measurement_tables, over_time, peaks)
    environment.globals |= {module.__name__.rpartition(".")[2]: module for module in known}
    environment.globals |= {"ABSENT": format.ABSENT, "HALF_PX": HALF_PX, "drawing": drawing}
    return environment


def breakable(name: str) -> Markup:
    """A name that may be broken after the signs that join its parts."""
    from markupsafe import Markup

    return Markup("<wbr>").join(re.findall(r"[^/+.-]*[/+.-]|[^/+.-]+", name))


def drawing(
    draw: Callable[..., Element | None], *given: Any, wide_px: float = WIDE_PX
) -> tuple[Markup, Markup] | None:
    """What `draw` makes of `given` and a width, for a desktop and a phone; None where it draws nothing."""
    wide, narrow = draw(*given, wide_px), draw(*given, NARROW_PX)
    if wide is None or narrow is None:
        return None
    return _written(wide), _written(narrow)


def _written(picture: Element) -> Markup:
    from markupsafe import Markup

    return Markup(tostring(picture, encoding="unicode"))  # noqa: S704 (tostring escapes texts and attributes)

"""One colour an engine, the same in every picture and table; the style sheet knows the classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

COLOURS = 7  # beside the reference's, which is grey


def colour_classes(names: Iterable[str], *, reference: str | None = None) -> dict[str, str]:
    """A CSS class an engine: "k0" for the reference, then "k1" to "k7"; the next seven are also "again"."""
    classes = {} if reference is None else {reference: "k0"}
    for index, name in enumerate(name for name in names if name != reference):
        classes[name] = f"k{index % COLOURS + 1}" + (" again" if (index // COLOURS) % 2 else "")
    return classes


def colour_of_training(names: Iterable[str], engines: Mapping[str, str], *, reference: str) -> str:
    """The class of the first engine of a variant in `names` ("variant method"), else the reference's."""
    variants = {name.partition(" ")[0] for name in names}
    of_engine = (class_ for engine, class_ in engines.items() if engine.rpartition("/")[0] in variants)
    return next((class_ for class_ in of_engine if class_ != engines[reference]), engines[reference])

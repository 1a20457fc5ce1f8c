"""What an input is filled with where nobody gave samples: numbers that the model can take."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

from hpml.core.contract import Config
from hpml.core.errors import ConfigInvalid

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_NAMES: tuple[tuple[Literal["positions", "zeros", "ones"], bool, re.Pattern[str]], ...] = (  # is it a mask?
    ("positions", False, re.compile(r"pos(ition)?s?(_?ids?)?")),
    ("zeros", False, re.compile(r"(token_?type|segment)(_?ids?)?")),  # all of one segment
    ("zeros", True, re.compile(r"(.*_)?pad(ding)?_?mask")),  # true where there is padding, as torch has it
    ("ones", True, re.compile(r"(.*_)?mask")),
)


class Fill(Config):
    """What an input is filled with, and why.

    kind: "normal", floats; "bits", 0 or 1 at random; "ids", at random from 0 to `below` - 1; "positions", 0,
    1, 2 along the last axis; "ones"; "zeros". below: what it indexes has so many entries; None: no table is
    known. is_mask: whether it hides something, of "ones" and "zeros". reason: how it was found out.
    """

    kind: Literal["normal", "bits", "ids", "positions", "ones", "zeros"]
    below: int | None = None
    parts: bool = False
    is_mask: bool = False
    reason: str = ""

    @property
    def is_guess(self) -> bool:
        """Whether nothing told what the input is."""
        return self.kind in ("normal", "bits")

    def draw(self, name: str, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> NDArray[Any]:
        """An array of that shape, (rows, ...), for the input `name`.

        Raises ConfigInvalid for more positions than there are.
        """
        import numpy as np

        if self.kind == "normal":
            return rng.standard_normal(shape, np.float32).astype(dtype)
        if self.kind == "bits":
            return rng.integers(0, 2, shape, np.uint8).astype(dtype)
        if self.kind == "ids":
            return rng.integers(0, self.below, shape).astype(dtype)
        if self.kind == "positions":
            count = shape[-1] if len(shape) > 1 else 1
            if self.below is not None and count > self.below:
                raise ConfigInvalid(
                    f"the input {name!r} would have positions from 0 to {count - 1}",
                    why=f"the model has {self.below} ({self.reason})",
                    fix=f"give a smaller --dim, at most {self.below}",
                )
            return np.broadcast_to(np.arange(count), shape).astype(dtype)
        return np.full(shape, self.kind == "ones", dtype)

    def in_words(self, shape: tuple[int, ...]) -> str:
        """What it is filled with and why; `shape` is without the rows."""
        what = {
            "normal": "random, standard normal",
            "bits": "0 or 1 at random",
            "ids": f"random ids from 0 to {(self.below or 1) - 1}",
            "positions": f"positions from 0 to {shape[-1] - 1 if shape else 0}",
            "ones": "ones",
            "zeros": "zeros",
        }[self.kind]
        return f"{what} ({self.reason})" if self.reason else what


def by_name(name: str, dtype: str) -> Fill:
    """What the name of an input tells; of "encoder/attention_mask:0" it is "attention_mask"."""
    last = re.sub(r":\d+$", "", name).replace("/", ".").rpartition(".")[2].lower()
    kind, is_mask = next(((kind, mask) for kind, mask, name in _NAMES if name.fullmatch(last)), (None, False))
    is_float = dtype.startswith("float")
    if kind == "positions" and (is_float or dtype == "bool"):
        kind = None
    if kind:
        return Fill(kind=kind, is_mask=is_mask, reason="by its name")
    if is_float:
        return Fill(kind="normal")
    return Fill(kind="bits", reason="nothing tells what it is; give real samples: --data")

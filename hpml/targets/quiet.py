"""Libraries that remark a lot, kept quiet. Imports none of them."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


@contextmanager
def quiet() -> Iterator[None]:
    """Without what the exporter and the quantizer remark along the way; their errors are exceptions."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)

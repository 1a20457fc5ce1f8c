"""A picture in, its classes out: how a server is asked about pictures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from pydantic import JsonValue

from hpml.tasks.endpoint import Endpoint
from hpml.tasks.image_classification import pictures
from hpml.tasks.image_classification.picture_spec import PictureSpec
from hpml.tasks.image_classification.pixels import Normalised, to_x_nchw

if TYPE_CHECKING:
    from hpml.tasks.base import Arrays

_MOST_TOLD = 5  # classes


def classify_endpoint(task: Normalised, class_names: Sequence[str], spec: PictureSpec) -> Endpoint:
    """`POST /v1/classify` with a PNG or JPEG, read as the training pictures were."""
    facts = spec.model_dump(mode="json")

    def feeds(body: bytes) -> Arrays:
        return {"x_nchw": to_x_nchw(pictures.read(io.BytesIO(body), facts)[None], task)}

    def answer(outputs: Arrays) -> JsonValue:
        logits = outputs["logits"][0].astype(np.float64)
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        classes: list[JsonValue] = [
            {"class": class_names[place], "probability": round(float(shares[place]), 6)}
            for place in np.argsort(-shares, kind="stable")[:_MOST_TOLD]
        ]
        return {"classes": classes}

    return Endpoint("/v1/classify", ("image/png", "image/jpeg"), feeds, answer)

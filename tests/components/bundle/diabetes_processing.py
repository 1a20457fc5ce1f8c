"""From patients in JSON to arrays, and from those to the progression of their disease."""

import numpy as np


def preprocess(raw, facts):
    return {name: np.array([patient[name] for patient in raw], np.float32) for name in ("body", "serum")}


def postprocess(outputs, facts):
    return [{"progression": row} for row in outputs["progression"] * facts["std"] + facts["mean"]]

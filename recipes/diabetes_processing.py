"""Patients as JSON to what the network takes, and its answers to JSON. A bundle ships this file."""

import numpy as np

MEASUREMENTS = ("age", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6")


def preprocess(raw, facts):
    """A list of patients to the inputs of the first operation. facts: the fields of the task."""
    return {
        "measurements": np.array([[patient[name] for name in MEASUREMENTS] for patient in raw], "float32"),
        "sex": np.array([patient["sex"] for patient in raw], "int64") - 1,
    }


def postprocess(outputs, facts):
    """The outputs to what can be JSON."""
    return [{"progression": round(score, 1)} for score in outputs["progression"].tolist()]

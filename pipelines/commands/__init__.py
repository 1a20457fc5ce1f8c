"""The verbs of `hpml`."""

"""The verbs of `hpml`, a file for each group: their options, and what they call."""

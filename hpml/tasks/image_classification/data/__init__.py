"""How labelled pictures become the arrays of a dataset: read, checked, split, written."""

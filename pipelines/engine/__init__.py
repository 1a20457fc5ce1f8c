"""Runs a plan: cache keys, the store, the record of a run."""

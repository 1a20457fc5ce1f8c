"""Labelled pictures, one class each."""

"""Measuring without a recipe: engines together, the machine, comparisons, diagnoses."""

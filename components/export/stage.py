"""Build an engine of a model for one target, and refuse it unless it agrees with the model."""

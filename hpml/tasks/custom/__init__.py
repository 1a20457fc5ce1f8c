"""A task of a user's own, by its import path."""

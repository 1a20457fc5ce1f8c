"""The HTML pages of commands."""

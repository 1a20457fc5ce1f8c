"""One execution of a stage, wherever it runs."""

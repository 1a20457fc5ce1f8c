"""What surrounds runs: what is installed, what is kept, the first recipe."""

"""From what a run chose to where it answers."""

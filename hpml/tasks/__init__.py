"""What depends on the kind of problem: labelled images."""

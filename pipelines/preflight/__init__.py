"""What is sure to fail, said before a run begins."""

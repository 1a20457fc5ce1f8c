"""Artifacts: folder.py reads and writes them; a kind is the file named after it; the others are parts."""

"""folder.py reads and writes artifacts; a kind of artifact is the file named after it, others are parts of kinds."""

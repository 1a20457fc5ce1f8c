"""The reader and writer of artifact folders, and a file for each kind of artifact, named after it."""

"""An engine in a process of its own: both ends."""

"""The training loop that `train` and `compress` share: one loop for one process and for many."""

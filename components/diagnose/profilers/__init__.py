"""The profilers of the runtimes: each gives the layers that a runtime really runs, and the time of each."""

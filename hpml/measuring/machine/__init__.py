"""The machine that measures: waiting threads, distances of cores, clocks, energy."""

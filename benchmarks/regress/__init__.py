"""Compares what a commit and the working tree cost in CPU time: `python -m benchmarks.regress`."""

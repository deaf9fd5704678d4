"""Measures a GPU's throughput and compares it with its limits: run with `python -m benchmarks.gpu`."""

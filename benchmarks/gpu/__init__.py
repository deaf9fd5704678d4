"""What a GPU gives, beside what it could: run with `python -m benchmarks.gpu`."""

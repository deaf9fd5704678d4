"""The registry's keeper: runs Redis where none is given, sweeps it, shows people and tools what is in it. No torch."""

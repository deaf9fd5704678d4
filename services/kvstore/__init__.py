"""The registry's keeper: runs Redis unless one is given, sweeps it, and checks its integrity. No torch."""

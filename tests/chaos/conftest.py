from tests.simulation.conftest import store

__all__ = ["store"]

from tests.engine.conftest import family, llama

__all__ = ["family", "llama"]

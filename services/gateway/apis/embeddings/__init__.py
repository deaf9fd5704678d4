"""Embeddings, scores and rankings of texts. The app may enter."""

from services.gateway.apis.embeddings.embeddings import EMBEDDING, read_embeddings
from services.gateway.apis.embeddings.scores import RERANK, SCORE, read_rerank, read_score

__all__ = ["EMBEDDING", "RERANK", "SCORE", "read_embeddings", "read_rerank", "read_score"]

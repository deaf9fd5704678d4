"""Vectors of texts, and what is made of them: scores and rankings. The app may enter."""

from services.gateway.apis.embeddings.embeddings import EMBEDDING, read_embeddings
from services.gateway.apis.embeddings.scores import RERANK, SCORE, read_rerank, read_score

__all__ = ["EMBEDDING", "RERANK", "SCORE", "read_embeddings", "read_rerank", "read_score"]

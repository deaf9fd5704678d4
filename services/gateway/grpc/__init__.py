"""The gRPC door: LLMService, its messages, and their readers. The gateway's server may enter."""

from services.gateway.grpc.service import LLMService

__all__ = [
    "LLMService",
]

"""The gRPC door: LLMService, its messages, and which of them are large. The gateway opens it."""

from services.gateway.grpc.service import LLMService

__all__ = [
    "LLMService",
]

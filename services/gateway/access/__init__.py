"""Who asks, and how much they may have."""

from services.gateway.access.access import Access, Client

__all__ = ["Access", "Client"]

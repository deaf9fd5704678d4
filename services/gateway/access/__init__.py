"""API keys, tenants and their limits. The gateway may enter."""

from services.gateway.access.access import ANYONE, Access, Caller
from services.gateway.access.allowances import Allowances, check_tier, headers_of

__all__ = ["ANYONE", "Access", "Allowances", "Caller", "check_tier", "headers_of"]

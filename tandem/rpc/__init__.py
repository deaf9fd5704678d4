"""gRPC for all processes: servers, channels, and the services that every process has. Anyone may enter."""

from tandem.hosts import address
from tandem.rpc.drain import DrainService
from tandem.rpc.endpoints import (
    CHANNEL_OPTIONS,
    KEEPALIVE,
    LIVE,
    MAX_REQUEST_BYTES,
    SERVER_OPTIONS,
    Refused,
    Server,
    Servicer,
    channel,
    serve,
)
from tandem.rpc.integrity_service import IntegrityService
from tandem.rpc.profile_service import ProfileService
from tandem.rpc.settings_service import SettingsService
from tandem.rpc.trace_service import TraceService

__all__ = [
    "CHANNEL_OPTIONS",
    "KEEPALIVE",
    "LIVE",
    "MAX_REQUEST_BYTES",
    "SERVER_OPTIONS",
    "DrainService",
    "IntegrityService",
    "ProfileService",
    "Refused",
    "Server",
    "Servicer",
    "SettingsService",
    "TraceService",
    "address",
    "channel",
    "serve",
]

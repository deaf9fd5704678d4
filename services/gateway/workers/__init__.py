"""The workers as the gateway reaches them: channels, token streams, mailboxes."""

from services.gateway.workers.connection import WorkerConnection
from services.gateway.workers.mailbox import Mailbox, Tokens
from services.gateway.workers.pool import WorkerPool
from services.gateway.workers.token_stream import TokenStream

__all__ = ["Mailbox", "TokenStream", "Tokens", "WorkerConnection", "WorkerPool"]

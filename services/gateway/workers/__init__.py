"""The workers as the gateway reaches them: channels, streams, mailboxes."""

from services.gateway.workers.connection import WorkerConnection
from services.gateway.workers.mailbox import Mailbox, Taker, Tokens
from services.gateway.workers.pool import WorkerPool
from services.gateway.workers.stream import Reply, WorkerStream

__all__ = ["Mailbox", "Reply", "Taker", "Tokens", "WorkerConnection", "WorkerPool", "WorkerStream"]

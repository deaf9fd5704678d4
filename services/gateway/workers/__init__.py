"""Connections to workers: channels, streams, mailboxes. The gateway may enter."""

from services.gateway.workers.connection import WorkerConnection
from services.gateway.workers.mailbox import Mailbox, Taker, Tokens
from services.gateway.workers.pool import Judging, WorkerPool
from services.gateway.workers.stream import Judge, Reply, WorkerStream

__all__ = ["Judge", "Judging", "Mailbox", "Reply", "Taker", "Tokens", "WorkerConnection", "WorkerPool", "WorkerStream"]

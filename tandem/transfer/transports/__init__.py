"""Transports by name. A new one is a file here and a line in TRANSPORTS: see docs/extending.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.transfer.transports.base import Missing, Network, Transport, Unusable
from tandem.transfer.transports.cuda_ipc import load_cuda_ipc
from tandem.transfer.transports.nccl import load_nccl
from tandem.transfer.transports.shm import ShmTransport

TRANSPORTS: dict[str, Callable[[], Transport]] = {"nccl": load_nccl, "cuda_ipc": load_cuda_ipc, "shm": ShmTransport}


def make_transports(names: Sequence[str], network: Network) -> list[Transport]:
    """Makes the named transports, best first; the network adds its own, such as tcp. Raises ValueError."""
    inline = network.inline()
    known = TRANSPORTS | {inline.name: lambda: inline}
    if not names or set(names) - known.keys():
        raise ValueError(f"transports: {list(names)} given, this network carries {sorted(known)}")
    made = [_made(name, known[name]) for name in names]
    missing = [f"{transport.name}: {transport.reason}" for transport in made if isinstance(transport, Missing)]
    if len(missing) == len(made):
        raise ValueError(f"transports: none can be used here: {'; '.join(missing)}")
    return made


def _made(name: str, make: Callable[[], Transport]) -> Transport:
    try:
        return make()
    except Unusable as why:
        return Missing(name, str(why))

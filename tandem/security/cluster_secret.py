"""Authentication between the processes of one cluster.

    cluster secret   a file that all of them can read. It never crosses a wire: gRPC calls, KV links and landing tickets
                     carry proofs of their content. A call names its receiver and its time, so a call that was
                     overheard is valid for no other process, and only for a short time
    TLS              gRPC between processes: each shows a certificate for NAME, signed by the cluster's own CA

Either, both or none may be used. With none, any process that reaches a port is served, so ports belong on loopback or a
private network.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic import Field

from tandem.settings import Settings

# The name in every certificate of a cluster, whatever the host's name.
NAME = "cluster.tandem"
MIN_SECRET_BYTES = 16
# The largest difference of two hosts' clocks, and the time for which an overheard call can be replayed.
MAX_SKEW_S = 120


class ClusterSecret:
    """The cluster's secret. Empty: there is none, and every proof is valid."""

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret

    @classmethod
    def read(cls, path: Path) -> ClusterSecret:
        """Reads a secret's file.

        Raises:
            OSError: the file cannot be read.
            ValueError: the secret is too short.
        """
        secret = path.read_bytes().strip()
        if len(secret) < MIN_SECRET_BYTES:
            raise ValueError(f"{path}: a cluster secret has at least {MIN_SECRET_BYTES} bytes, got {len(secret)}")
        return cls(secret)

    def __bool__(self) -> bool:
        return bool(self._secret)

    def proof(self, purpose: str, said: bytes = b"") -> str:
        """Returns the proof that a process with the secret said this, for this purpose; empty without a secret."""
        if not self._secret:
            return ""
        return hmac.new(self._secret, purpose.encode() + b"\0" + said, "sha256").hexdigest()

    def proves(self, proof: str, purpose: str, said: bytes = b"") -> bool:
        return hmac.compare_digest(proof.encode(), self.proof(purpose, said).encode()) if self._secret else True

    def call_proof(self, address: str, now: float) -> str:
        """Returns the proof of a call to the process at `address`, made `now`."""
        said = f"{int(now)} {address}"
        return f"{said} {self.proof('call', said.encode())}"

    def wrong_with(self, proof: str, address: str, now: float) -> str:
        """Returns what is wrong with the proof of a call to the process at `address`; empty if it is valid."""
        said, _, proven = proof.rpartition(" ")
        if not self.proves(proven, "call", said.encode()):
            return "this port is for processes with --cluster-secret, a file that tandem up makes beside its logs"
        at, _, to = said.partition(" ")
        if to != address:
            return f"the call is for {to}, and this is {address}"
        if abs(now - int(at)) > MAX_SKEW_S:
            return f"by this host's clock the call is {abs(now - int(at)):.0f} s off: more than {MAX_SKEW_S}"
        return ""


NO_SECRET = ClusterSecret()


@dataclass(frozen=True, slots=True)
class TLS:
    """PEM files, which may be replaced at any time: each new connection uses their present content."""

    certificate: Path
    key: Path
    ca: Path

    @classmethod
    def of(cls, folder: Path) -> TLS:
        return cls(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")


@dataclass(frozen=True, slots=True)
class Security:
    secret: ClusterSecret = NO_SECRET
    tls: TLS | None = None


OPEN = Security()


class ClusterSettings(Settings):
    """The settings that every process of a cluster has."""

    cluster_secret: Path | None = Field(None, description="file with the secret that all processes of a cluster share")
    tls: Path | None = Field(
        None,
        description="folder of PEM files, as Kubernetes writes a certificate: tls.crt, for the name "
        f"{NAME}, tls.key, ca.crt; gRPC within the cluster is then TLS",
    )

    @cached_property
    def security(self) -> Security:
        """Reads the secret, and returns it with the TLS files.

        Raises:
            OSError, ValueError: the secret cannot be read.
        """
        secret = ClusterSecret.read(self.cluster_secret) if self.cluster_secret else NO_SECRET
        return Security(secret, TLS.of(self.tls) if self.tls else None)

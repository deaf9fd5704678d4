"""How the processes of one cluster know each other, and strangers do not get in.

    cluster secret   a file that all of them can read. It never crosses a wire: gRPC calls, KV links and landing tickets
                     carry proofs of what they say. A call says whom it is for and when it was made, so one that is
                     overheard opens no other door, and this one not for long
    TLS              gRPC between them: each shows a certificate for NAME, signed by the cluster's own CA

Either, both or none: without both, who reaches a port gets in, so ports belong on loopback or a private network.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic import Field

from tandem.settings import Settings

# Whom every certificate of a cluster is for, whatever its host is called.
NAME = "cluster.tandem"
MIN_SECRET_BYTES = 16
# How far the clocks of two hosts may be apart, and how long a call that was overheard can be repeated.
MAX_SKEW_S = 120


class ClusterSecret:
    """Empty: there is none, and everything is proven."""

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret

    @classmethod
    def read(cls, path: Path) -> ClusterSecret:
        """
        Raises:
            OSError: it cannot be read.
            ValueError: it is too short.
        """
        secret = path.read_bytes().strip()
        if len(secret) < MIN_SECRET_BYTES:
            raise ValueError(f"{path}: a cluster secret has at least {MIN_SECRET_BYTES} bytes, got {len(secret)}")
        return cls(secret)

    def __bool__(self) -> bool:
        return bool(self._secret)

    def proof(self, purpose: str, said: bytes = b"") -> str:
        """That somebody who has the secret has said this, for this purpose; empty where there is none."""
        if not self._secret:
            return ""
        return hmac.new(self._secret, purpose.encode() + b"\0" + said, "sha256").hexdigest()

    def proves(self, proof: str, purpose: str, said: bytes = b"") -> bool:
        return hmac.compare_digest(proof.encode(), self.proof(purpose, said).encode()) if self._secret else True

    def call_proof(self, address: str, now: float) -> str:
        """For a call to the process at `address`, which is `now`."""
        said = f"{int(now)} {address}"
        return f"{said} {self.proof('call', said.encode())}"

    def wrong_with(self, proof: str, address: str, now: float) -> str:
        """Why a call with this proof is none of the cluster's to the process at `address`; empty where it is one."""
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
    """PEM files. They may be replaced at any time: each new connection is made with what is in them then."""

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
    """Settings of every process of a cluster."""

    cluster_secret: Path | None = Field(None, description="file with the secret that all processes of a cluster share")
    tls: Path | None = Field(
        None,
        description="folder of PEM files, as Kubernetes writes a certificate: tls.crt, for the name "
        f"{NAME}, tls.key, ca.crt; gRPC within the cluster is then TLS",
    )

    @cached_property
    def security(self) -> Security:
        """
        Raises:
            OSError, ValueError: the secret cannot be read.
        """
        secret = ClusterSecret.read(self.cluster_secret) if self.cluster_secret else NO_SECRET
        return Security(secret, TLS.of(self.tls) if self.tls else None)

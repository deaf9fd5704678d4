"""The expiry of a process's TLS certificate, read at each scrape, as files may be renewed. A module by itself."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from tandem.catalogue.metrics import PROCESS
from tandem.security import TLS


def watch(registry: CollectorRegistry, tls: TLS | None) -> None:
    if tls is not None:
        registry.register(_CertificateCollector(tls))


def expiry_of(tls: TLS) -> float:
    """Returns the expiry in Unix seconds; 0 for a certificate that its CA's clients refuse, such as an expired one.

    The standard library reads only peers' certificates, so this makes a TLS connection in memory between two ends.
    """
    try:
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        server.load_cert_chain(tls.certificate, tls.key)
        client.check_hostname = False
        client.load_verify_locations(tls.ca)
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
        for end in (*ends, *ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
        return float(ssl.cert_time_to_seconds(str((ends[0].getpeercert() or {})["notAfter"])))
    except (OSError, ValueError, KeyError):  # ssl.SSLError is an OSError
        return 0.0


class _CertificateCollector(Collector):
    def __init__(self, tls: TLS) -> None:
        self._tls = tls

    def collect(self) -> Iterator[Metric]:
        family = PROCESS["tandem_certificate_expiry_timestamp_seconds"].family()
        family.add_metric((), expiry_of(self._tls))
        yield family

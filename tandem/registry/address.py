"""Where Redis is and how one gets in, as a URL says it.

redis://[user][:password]@host[:port][/database]      rediss:// over TLS      unix://[user][:password]@/path[?db=n]

TLS options go behind a question mark: ssl_ca_certs, ssl_certfile, ssl_keyfile name files, which are read anew for each
connection, so a renewed certificate needs no restart; ssl_check_hostname=false accepts any host that the CA signed.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

PORT = 6379
FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
OPTIONS = frozenset({*FILES, "ssl_check_hostname", "db"})


@dataclass(frozen=True, slots=True)
class RedisAddress:
    host: str
    port: int
    path: str  # of a Unix socket; then there is no host
    username: str = field(repr=False)
    password: str = field(repr=False)
    database: int
    tls: bool
    options: dict[str, str]

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """
        Raises:
            ValueError: says what is wrong with the URL, without its password.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ValueError(f"the Redis URL must begin with redis://, rediss:// or unix://, got {parts.scheme}://")
        options = dict(parse_qsl(parts.query))
        if unknown := options.keys() - OPTIONS:
            raise ValueError(
                f"the Redis URL has the unknown option {min(unknown)}; there are {', '.join(sorted(OPTIONS))}"
            )
        unix = parts.scheme == "unix"
        database = options.get("db") or ("" if unix else parts.path.strip("/")) or "0"
        if not database.isdecimal():
            raise ValueError(f"the Redis URL names database {database!r}, which must be a number")
        return cls(
            host=parts.hostname or "localhost",
            port=parts.port or PORT,
            path=unquote(parts.path) if unix else "",
            username=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
            database=int(database),
            tls=parts.scheme == "rediss",
            options=options,
        )

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"

    def handshake(self) -> list[tuple[str, ...]]:
        """What a new connection says first."""
        login = [("AUTH", *filter(None, (self.username, self.password)))] if self.password else []
        return login + ([("SELECT", str(self.database))] if self.database else [])

    def tls_context(self) -> ssl.SSLContext | None:
        """
        Raises:
            OSError: a file cannot be read, or is no certificate or key.
        """
        if not self.tls:
            return None
        ca, certificate, key = (self.options.get(name) for name in FILES)
        context = ssl.create_default_context(cafile=ca)
        context.check_hostname = self.options.get("ssl_check_hostname", "true").lower() != "false"
        if certificate:
            context.load_cert_chain(certificate, key)
        return context

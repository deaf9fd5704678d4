"""The address of Redis and the credentials for it, as a URL.

redis://[user][:password]@host[:port][/database]      rediss:// over TLS      unix://[user][:password]@/path[?db=n]
redis+sentinel://[user][:password]@host[:port][,host[:port]...]/master[/database]      rediss+sentinel:// over TLS

With +sentinel the hosts are sentinels, and `master` is the name under which they watch Redis. User and password are
Redis's; sentinels may have their own: ?sentinel_username=...&sentinel_password=...

TLS options follow a question mark: ssl_ca_certs, ssl_certfile, ssl_keyfile name files, which are read again for each
connection, so a renewed certificate needs no restart; ssl_check_hostname=false accepts any host that the CA signed.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qsl, unquote, urlsplit

from tandem.hosts import address

PORT = 6379
SENTINEL_PORT = 26379
SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
OPTIONS = frozenset({*FILES, "ssl_check_hostname", "db"})
SENTINEL_OPTIONS = frozenset({"sentinel_username", "sentinel_password"})


@dataclass(frozen=True, slots=True)
class RedisAddress:
    host: str
    port: int
    path: str  # the path of a Unix socket; then `host` is empty
    username: str = field(repr=False)
    password: str = field(repr=False)
    database: int
    tls: bool
    options: dict[str, str] = field(repr=False)
    sentinels: tuple[RedisAddress, ...] = ()
    master: str = ""  # the master's name at the sentinels, which return its host and port

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """Parses a URL.

        Raises:
            ValueError: names what is wrong with the URL, but not its password.
        """
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES:
            raise ValueError(
                f"redis_url must begin with {', '.join(f'{s}://' for s in SCHEMES)}, got {parts.scheme}://"
            )
        unix, sentinel = parts.scheme == "unix", parts.scheme.endswith("+sentinel")
        options = dict(parse_qsl(parts.query))
        known = OPTIONS | SENTINEL_OPTIONS if sentinel else OPTIONS
        if unknown := options.keys() - known:
            raise ValueError(f"redis_url has the unknown option {min(unknown)}; there are {', '.join(sorted(known))}")
        master, _, path = parts.path.strip("/").partition("/") if sentinel else ("", "", parts.path.strip("/"))
        database = options.get("db") or ("" if unix else path) or "0"
        if not database.isdecimal():
            raise ValueError(f"redis_url names database {database!r}, which must be a number")
        address = cls(
            host="" if sentinel else parts.hostname or "localhost",
            port=0 if sentinel else parts.port or PORT,
            path=unquote(parts.path) if unix else "",
            username=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
            database=int(database),
            tls=parts.scheme.startswith("rediss"),
            options=options,
            master=unquote(master),
        )
        return address._watched_by(parts.netloc.rpartition("@")[2]) if sentinel else address

    def _watched_by(self, hosts: str) -> RedisAddress:
        if not self.master:
            raise ValueError("redis_url names no master behind its sentinels, as in redis+sentinel://host/mymaster")
        parts = [urlsplit(f"//{host}") for host in hosts.split(",")]
        try:
            places = [(part.hostname or "", part.port or SENTINEL_PORT) for part in parts]
        except ValueError:  # the port is no number
            places = []
        if not places or not all(host for host, _ in places):
            raise ValueError(f"redis_url names sentinels {hosts!r}, which must be host[:port],host[:port]...")
        username, password = (self.options.get(f"sentinel_{name}", "") for name in ("username", "password"))
        sentinel = replace(self, username=username, password=password, database=0, master="")
        return replace(self, sentinels=tuple(replace(sentinel, host=host, port=port) for host, port in places))

    def __str__(self) -> str:
        if self.sentinels:
            return f"{self.master} of {','.join(map(str, self.sentinels))}"
        return self.path or address(self.host, self.port)

    def handshake(self) -> list[tuple[str, ...]]:
        """Returns the commands that a new connection sends first."""
        login = [("AUTH", *filter(None, (self.username, self.password)))] if self.password else []
        return login + ([("SELECT", str(self.database))] if self.database else [])

    def tls_context(self) -> ssl.SSLContext | None:
        """Returns the TLS context; None without TLS.

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

"""Bodies that clients send compressed by gzip, held to the size of a plain body."""

from __future__ import annotations

import zlib

from services.gateway.errors import BodyTooLarge, InvalidRequest, UnsupportedEncoding

GZIP = 16 + zlib.MAX_WBITS
PLAIN = ("", "identity")
MOST_MEMBERS = 16  # each costs a copy of the members after it


def is_compressed(said: str) -> bool:
    """True if a content-encoding header names gzip. Raises UnsupportedEncoding."""
    encoding = said.strip().lower()
    if encoding in PLAIN:
        return False
    if encoding not in ("gzip", "x-gzip"):
        raise UnsupportedEncoding(
            f"content-encoding must be gzip or identity, got {said!r}", "content-encoding", "unsupported_encoding"
        )
    return True


def decompressed(data: bytes, limit: int) -> bytes:
    """Returns the body of one or several gzip members. At most `limit` + 1 bytes are ever decompressed.

    Raises:
        BodyTooLarge: more than `limit` bytes.
        InvalidRequest: the body is no gzip, or incomplete.
    """
    parts: list[bytes] = []
    left = limit + 1
    while data:
        if len(parts) == MOST_MEMBERS:
            raise InvalidRequest(f"gzip: at most {MOST_MEMBERS} members", code="invalid_encoding")
        member = zlib.decompressobj(GZIP)
        try:
            parts.append(member.decompress(data, left))
        except zlib.error as error:
            raise InvalidRequest(f"the body is not valid gzip: {error}", code="invalid_encoding") from None
        left -= len(parts[-1])
        if left <= 0:
            raise BodyTooLarge(f"the body must not be larger than {limit} bytes decompressed", code="body_too_large")
        if not member.eof:
            raise InvalidRequest("the body ends in the middle of its gzip data", code="invalid_encoding")
        data = member.unused_data
    return b"".join(parts)

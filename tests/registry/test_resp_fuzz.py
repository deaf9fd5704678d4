"""Redis, or what stands in its place, says anything at all: every call ends, in a reply or a typed error."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.registry.wire.address import RedisAddress
from tandem.registry.wire.resp import ReplyError, RespConnection
from tests.fuzzing import fuzzed

pytestmark = pytest.mark.fast

REPLIES = st.one_of(
    st.binary(max_size=60),
    st.lists(
        st.sampled_from([b"+OK\r\n", b"-ERR x\r\n", b":1\r\n", b"$3\r\nabc\r\n", b"$-1\r\n", b"*2\r\n", b"*-1\r\n",
                         b"$9999999999\r\n", b"*99999999\r\n", b"\xff\xfe\r\n", b"$2\r\n\xff\xfe\r\n"]),
        max_size=5,
    ).map(b"".join),
)  # fmt: skip


@fuzzed(60)
@given(said=REPLIES, binary=st.booleans())
def test_a_call_ends_whatever_is_said(said: bytes, binary: bool) -> None:
    asyncio.run(_ask(said, binary))


async def _ask(said: bytes, binary: bool) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(said)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, asyncio.timeout(30.0):
        line = await RespConnection.open(RedisAddress.parse(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        try:
            await line.ask(("PING",), binary)
        except (ReplyError, OSError):
            pass
        finally:
            line.end("done")

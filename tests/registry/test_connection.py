"""How a client gets in: users, databases, and what it says when it does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tandem.local import RedisServer
from tandem.registry import BlockReplica, Limits, Registry, RegistryUnavailable
from tandem.registry.wire.address import RedisAddress
from tests.registry.cluster import MODEL, known_prefix, register_pool


@pytest.fixture
async def guarded(own_redis: RedisServer) -> str:
    """The address, without the user, of a server that only the user `tandem` may use."""
    async with Redis.from_url(own_redis.url) as admin:
        await admin.acl_setuser(
            "tandem", enabled=True, passwords=["++a p:ss"], keys=["*"], channels=["*"], categories=["+@all"]
        )
        await admin.acl_setuser("default", enabled=False)
    return f"127.0.0.1:{own_redis.port}"


async def test_user_password_and_database_are_as_the_url_says(guarded: str) -> None:
    registry = Registry.connect(f"redis://tandem:%2Ba%20p%3Ass@{guarded}/3", timeout=30.0)
    await register_pool(registry)
    async with registry.changes() as changes:
        await registry.leases.deregister("p0", "p0-first")
        assert await changes.wait(2.0)
        assert not await changes.wait(0.01)
    assert len(await registry.workers()) == 1
    await registry.close()
    async with Redis.from_url(f"redis://tandem:%2Ba%20p%3Ass@{guarded}/3") as client:
        assert await client.dbsize() > 0


async def test_the_rights_that_docs_name_are_enough(own_redis: RedisServer) -> None:
    said = re.search(
        r"ACL SETUSER tandem (.*)", (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    )
    assert said
    async with Redis.from_url(own_redis.url) as admin:
        await admin.execute_command("ACL", "SETUSER", "tandem", *said[1].split())
        await admin.acl_setuser("default", enabled=False)
    registry = Registry.connect(f"redis://tandem:PASSWORD@127.0.0.1:{own_redis.port}", timeout=30.0)
    async with registry.changes() as changes:
        await register_pool(registry)
        assert await changes.wait(2.0)
    await registry.leases.publish_blocks("d0", "d0-first", [b"a" * 16], [])
    replica = BlockReplica(registry.block_feed)
    await replica.refresh()
    assert len(replica) == 1
    route = await registry.reservations.select_and_reserve(
        request_id="r", model=MODEL, prompt_tokens=40, max_new_tokens=8, prefill="require", ttl=5.0,
        prefix=await known_prefix(registry, [b"a" * 16, b"b" * 16]),
    )  # fmt: skip
    assert await registry.reservations.release(route.reservation_id)
    taken = await registry.limits.take("t", Limits(1, 100, 1, 1.0), request_id="r", tokens=5, cost=0.1, ttl=5.0)
    await registry.limits.settle(taken, 1, 1, 0.1)
    assert (await registry.limits.usage("t")).requests == 1
    assert await registry.locate([b"a" * 16]) == [["d0"]]
    await registry.leases.deregister("p0", "p0-first")
    await registry.sweep()
    assert (await registry.check_integrity()).violations == ()
    await registry.close()


@pytest.mark.parametrize("user", ["", "tandem:wrong@", "nobody:secret@"])
async def test_a_user_that_is_refused_is_unavailable_and_says_why(guarded: str, user: str) -> None:
    registry = Registry.connect(f"redis://{user}{guarded}", timeout=30.0)
    with pytest.raises(RegistryUnavailable, match=rf"{re.escape(guarded)} refuses: (NOAUTH|WRONGPASS)") as raised:
        await registry.ping()
    assert "wrong@" not in str(raised.value)
    with pytest.raises(RegistryUnavailable):
        async with registry.changes():
            pass
    await registry.close()


async def test_a_subscription_says_that_its_server_went(own_redis: RedisServer) -> None:
    registry = Registry.connect(own_redis.url, timeout=30.0)
    async with registry.changes() as changes:
        own_redis.kill()
        with pytest.raises(RegistryUnavailable, match=str(own_redis.port)):
            await changes.wait(2.0)
    await registry.close()


def test_an_address_is_all_that_a_url_may_say() -> None:
    address = RedisAddress.parse("rediss://u:p%40@cache.example:6380/2?ssl_check_hostname=false")
    assert (address.host, address.port, address.database, address.tls) == ("cache.example", 6380, 2, True)
    assert address.handshake() == [("AUTH", "u", "p@"), ("SELECT", "2")]
    assert "p@" not in repr(address)
    unix = RedisAddress.parse("unix:///run/redis.sock?db=4")
    assert (str(unix), unix.handshake()) == ("/run/redis.sock", [("SELECT", "4")])
    assert str(RedisAddress.parse("redis://")) == "localhost:6379"


def test_an_address_behind_sentinels_has_theirs() -> None:
    address = RedisAddress.parse(
        "rediss+sentinel://u:p%40@[::1]:5,Two/my%20master/3?sentinel_username=s&sentinel_password=q"
    )
    assert (address.master, address.tls, address.database) == ("my master", True, 3)
    assert address.handshake() == [("AUTH", "u", "p@"), ("SELECT", "3")]
    assert [(s.host, s.port, s.tls, s.handshake()) for s in address.sentinels] == [
        ("::1", 5, True, [("AUTH", "s", "q")]),
        ("two", 26379, True, [("AUTH", "s", "q")]),
    ]
    assert str(address) == "my master of [::1]:5,two:26379"
    assert "'q'" not in repr(address)


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("http://x", "must begin with redis://"),
        ("redis://x/one", "names database 'one', which must be a number"),
        ("redis://:secret@x/?timeout=1", "unknown option timeout"),
        ("redis://:secret@x/?sentinel_password=secret", "unknown option sentinel_password"),
        ("redis+sentinel://:secret@x:26379,y", "names no master behind its sentinels"),
        ("redis+sentinel://:secret@x,/mymaster", "names sentinels 'x,', which must be"),
        ("redis+sentinel://:secret@/mymaster", "names sentinels '', which must be"),
        ("redis+sentinel://:secret@x:y/mymaster", "names sentinels 'x:y', which must be"),
        ("redis+sentinel://:secret@x/mymaster/one", "names database 'one'"),
    ],
)
def test_a_malformed_url_is_named_without_its_password(url: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=f"^redis_url .*{wrong}") as raised:
        RedisAddress.parse(url)
    assert "secret" not in str(raised.value)

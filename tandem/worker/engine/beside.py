"""A worker's cache, for what moves blocks in and out of it beside the engine's steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tandem.block_hash import block_hashes, root_hash
from tandem.engine import Engine, KVLayout, Request
from tandem.worker.engine.port import Ended, EnginePort, Event

T = TypeVar("T")


def block_chain(layout: KVLayout, request: Request) -> list[bytes]:
    """Root and names of the prompt's blocks, but that of its last token, which is computed."""
    root = root_hash(layout.model, layout.revision, request.lora.revision if request.lora else "", request.cache_salt)
    return [root, *block_hashes(root, request.token_ids[:-1], layout.block_size)]


async def at_once(port: EnginePort, name: str, fn: Callable[[Engine], T]) -> T:
    """Result of `fn`, which may take blocks for `name`: beside a step where that is to be had, for they are free or
    cached already. A caller that is cancelled gets nothing, and nothing stays taken."""
    done = port.beside_step(lambda engine: [fn(engine)])
    if done is not None:
        return done[0]
    try:
        return await port.call(fn)
    except BaseException:
        release(port, name)
        raise


def release(port: EnginePort, name: str) -> None:
    """Blocks taken for `name` are free again; from any thread. The event says so to who waits for blocks."""

    def release_it(engine: Engine) -> Sequence[Event]:
        engine.moving.release(name)
        return [Ended(name)]

    port.submit(name, release_it)


def land(port: EnginePort, name: str, num_cached: int, num_landed: int) -> None:
    """Nothing is written any more to the blocks expected for `name`: so many of them have come; from any thread.
    The event says so to who waits for blocks."""

    def land_them(engine: Engine) -> Sequence[Event]:
        engine.moving.land(name, num_cached, num_landed)
        return [Ended(name)]

    port.submit(name, land_them)


def give_up(port: EnginePort, name: str) -> None:
    """Lets no sequence wait any longer for the blocks expected for `name`, which stay taken; from any thread."""

    def give_them_up(engine: Engine) -> Sequence[Event]:
        engine.moving.give_up(name)
        return ()

    port.submit(name, give_them_up)

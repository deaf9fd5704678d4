"""Access to a worker's cache for transfers that move its blocks beside the engine's steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tandem.block_hash import block_hashes
from tandem.engine import Engine, KVLayout, Request
from tandem.worker.engine.port import Ended, EnginePort, Event, root_of

T = TypeVar("T")


def block_chain(layout: KVLayout, request: Request) -> list[bytes]:
    """Returns the root hash and the prompt's full blocks' hashes. The last token is left out: it is always computed."""
    root = root_of(layout, request)
    return [root, *block_hashes(root, request.token_ids[:-1], layout.block_size)]


async def at_once(port: EnginePort, name: str, fn: Callable[[Engine], T]) -> T:
    """Returns the result of `fn`, which may take free or cached blocks for `name`.

    Runs `fn` beside a step if it can and no landing waits for the step's end, so that `fn` finds all that has landed.
    If the caller is cancelled, the blocks are released.
    """

    def counted(engine: Engine) -> T:
        with port.steps.moving():
            return fn(engine)

    done = None if port.landing else port.beside_step(lambda engine: [counted(engine)])
    if done is not None:
        return done[0]
    try:
        return await port.call(counted)
    except BaseException:
        release(port, name)
        raise


def release(port: EnginePort, name: str) -> None:
    """Releases the blocks taken for `name`, from any thread. The Ended event wakes sequences that wait for blocks."""

    def release_it(engine: Engine) -> Sequence[Event]:
        with port.steps.moving():
            engine.moving.release(name)
        return [Ended(name)]

    port.submit(name, release_it)


def land(port: EnginePort, name: str, num_cached: int, num_landed: int) -> None:
    """Ends the transfer into the blocks expected for `name`, of which `num_landed` have arrived. The Ended event wakes
    sequences that wait for blocks.

    Call it on the event loop, unless none has arrived. Blocks that have are found at once: they land beside a step if
    they can, as what is restored or lent next follows on them.
    """

    def land_them(engine: Engine) -> Sequence[Event]:
        port.landing.discard(name)
        with port.steps.moving():
            engine.moving.land(name, num_cached, num_landed)
        return [Ended(name)]

    if num_landed:
        port.landing.add(name)
    events = port.beside_step(land_them) if num_landed else None
    port.submit(name, land_them if events is None else lambda engine: events)


def give_up(port: EnginePort, name: str) -> None:
    """Stops sequences from waiting for the blocks expected for `name`, which stay taken; from any thread."""

    def give_them_up(engine: Engine) -> Sequence[Event]:
        engine.moving.give_up(name)
        return ()

    port.submit(name, give_them_up)

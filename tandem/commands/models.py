"""`tandem models`: the models of a cluster and their aliases. Gateways follow changes within two seconds."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable

from tandem.aliases import FALLBACK, MOST_ALIASES, Alias
from tandem.commands.clusters import UP_ADDRESSES
from tandem.commands.clusters.own_cluster import with_own_password
from tandem.registry import Registry, RegistryUnavailable, Role

Act = Callable[[Registry, argparse.Namespace], Awaitable[None]]


def main(arguments: list[str]) -> None:
    said = _parser().parse_args(arguments)
    acts: dict[str, Act] = {"list": _list, "alias": _alias, "unalias": _unalias}
    try:
        asyncio.run(_with_registry(acts[said.action], said))
    except (ValueError, RegistryUnavailable) as error:
        raise SystemExit(f"tandem models: {error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tandem models", description="What a running cluster serves, by which names.")
    actions = parser.add_subparsers(dest="action", required=True)
    listing = actions.add_parser("list", help="models, adapters and aliases")
    alias = actions.add_parser("alias", help="have one name answered by several models, from now on")
    alias.add_argument(
        "alias",
        type=_parsed,
        help="NAME=MODEL:WEIGHT,MODEL:WEIGHT,MODEL:fallback; the last where others have no workers",
    )
    unalias = actions.add_parser("unalias", help="return a name to what cluster.yaml says of it, if anything")
    unalias.add_argument("name")
    for action in (listing, alias, unalias):
        for option, variable, default, words in (
            ("--redis-url", "REDIS_URL", UP_ADDRESSES["redis_url"], "the registry"),
            ("--namespace", "NAMESPACE", "tandem", "prefix of its keys"),
        ):
            given = os.environ.get(f"TANDEM_{variable}", default)
            action.add_argument(option, default=given, help=f"{words} (default: {given})")
    return parser


def _parsed(text: str) -> Alias:
    try:
        return Alias.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


async def _with_registry(act: Act, said: argparse.Namespace) -> None:
    registry = Registry.connect(with_own_password(said.redis_url), namespace=said.namespace)
    try:
        await act(registry, said)
    finally:
        await registry.close()


async def _list(registry: Registry, said: argparse.Namespace) -> None:
    workers = Counter((worker.info.model, worker.info.role) for worker in await registry.workers())
    print(f"{'name':<32}{'prefill':>8}{'decode':>8}  answered by")
    for name in sorted({model for model, _ in workers}):
        print(f"{name:<32}{workers[name, Role.PREFILL]:>8}{workers[name, Role.DECODE]:>8}")
    for name, ref in sorted((await registry.adapters.all()).by_name.items()):
        print(f"{name:<48}  {ref.model}, with the adapter at {ref.path}")
    for name, alias in sorted((await registry.aliases.all()).by_name.items()):
        print(f"{name:<48}  {_words(alias)}")


async def _alias(registry: Registry, said: argparse.Namespace) -> None:
    """Raises ValueError: there are too many."""
    alias: Alias = said.alias
    known = (await registry.aliases.all()).by_name
    if alias.name not in known and len(known) >= MOST_ALIASES:
        raise ValueError(f"there are {MOST_ALIASES} aliases: `tandem models unalias` one first")
    await registry.aliases.put(alias.name, alias)
    print(f"{alias.name}: {_words(alias)}")
    there = {worker.info.model for worker in await registry.workers()} | (await registry.adapters.all()).by_name.keys()
    for name in alias.targets:
        if name not in there:
            print(f"{name} has no workers now; it is left out until it has")


async def _unalias(registry: Registry, said: argparse.Namespace) -> None:
    """Raises ValueError: there is none of this name."""
    if said.name not in (await registry.aliases.all()).by_name:
        raise ValueError(f"{said.name!r} is no alias that `tandem models alias` has set")
    await registry.aliases.drop(said.name)
    print(f"{said.name} is no alias any more")


def _words(alias: Alias) -> str:
    parts = [f"{name} {share:.1%}" for name, share in alias.shares.items()]
    return ", ".join([*parts, *(f"{name} as {FALLBACK}" for name in alias.fallbacks)])

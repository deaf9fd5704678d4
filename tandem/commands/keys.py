"""`tandem keys`: who may use a gateway. Gateways that follow the file see a change within a second."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
from datetime import UTC, datetime
from pathlib import Path

from tandem.commands.clusters import UP_ADDRESSES
from tandem.commands.clusters.own_cluster import with_own_password
from tandem.registry import Registry, RegistryUnavailable
from tandem.security import DEFAULT_TIER, ApiKey, Keys, digest, read_keys, text_of, write_keys

FILE = ".run/keys.json"


def main(arguments: list[str]) -> None:
    said = _parser().parse_args(arguments)
    try:
        {"add": _add, "list": _list, "revoke": _revoke, "usage": _usage}[said.action](said)
    except (OSError, ValueError, RegistryUnavailable) as error:
        raise SystemExit(f"tandem keys: {error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tandem keys", description="Who may use a gateway: API keys in a file.")
    actions = parser.add_subparsers(dest="action", required=True)
    add = actions.add_parser("add", help="make a key and print it, once: the file holds only its hash")
    add.add_argument("--tenant", required=True, help="whose requests these are: shares and limits are for a tenant")
    add.add_argument("--tier", default=DEFAULT_TIER, help="what it may use, as the file's tiers say")
    add.add_argument("--names-tenants", action="store_true", help="a proxy's key: its requests may name other tenants")
    add.add_argument(
        "--model", action="append", help="a model, alias or adapter that it may use; again for each; default: all"
    )
    add.add_argument(
        "--manages-models", action="store_true", help="it may load adapters and set what the cluster follows"
    )
    listing = actions.add_parser("list", help="show the keys, without their secrets")
    revoke = actions.add_parser("revoke", help="end a key")
    revoke.add_argument("id", help="as `tandem keys list` shows it")
    usage = actions.add_parser("usage", help="what each tenant has used today (UTC)")
    _option(usage, "--redis-url", "REDIS_URL", UP_ADDRESSES["redis_url"], "the registry")
    _option(usage, "--namespace", "NAMESPACE", "tandem", "prefix of its keys")
    for action in (add, listing, revoke, usage):
        _option(action, "--file", "API_KEYS", FILE, "the gateway's --api-keys")
    return parser


def _option(parser: argparse.ArgumentParser, name: str, variable: str, default: str, words: str) -> None:
    """Add an option with the variable and the default of `tandem up`."""
    given = os.environ.get(f"TANDEM_{variable}", default)
    parser.add_argument(name, default=given, type=Path if name == "--file" else str, help=f"{words} (default: {given})")


def _add(said: argparse.Namespace) -> None:
    keys = read_keys(said.file) if said.file.exists() else Keys()
    if said.tier not in keys.tiers:
        raise ValueError(f"--tier: {said.file} has no tier {said.tier!r}; it has {', '.join(keys.tiers)}")
    name, secret = secrets.token_hex(4), secrets.token_urlsafe(32)
    today = datetime.now(UTC).date().isoformat()
    said.file.parent.mkdir(parents=True, exist_ok=True)
    may = {"names_tenants": said.names_tenants, "manages_models": said.manages_models}
    key = ApiKey(
        id=name, sha256=digest(secret), tenant=said.tenant, tier=said.tier, created=today, models=said.model, **may
    )
    write_keys(said.file, keys.add(key))
    print(text_of(name, secret))


def _list(said: argparse.Namespace) -> None:
    print(f"{'id':<10}{'tenant':<24}{'tier':<16}{'created':<12}models")
    for key in read_keys(said.file).keys:
        models = "all" if key.models is None else ", ".join(sorted(key.models))
        print(f"{key.id:<10}{key.tenant:<24}{key.tier:<16}{key.created:<12}{models}")


def _revoke(said: argparse.Namespace) -> None:
    keys = read_keys(said.file)
    if said.id not in {key.id for key in keys.keys}:
        raise ValueError(f"{said.file} has no key {said.id!r}")
    write_keys(said.file, keys.without(said.id))
    print(f"key {said.id} is revoked")


def _usage(said: argparse.Namespace) -> None:
    asyncio.run(_print_usage(said))


async def _print_usage(said: argparse.Namespace) -> None:
    registry = Registry.connect(with_own_password(said.redis_url), namespace=said.namespace)
    try:
        print(
            f"{'tenant':<24}{'requests':>10}{'prompt tokens':>16}{'of them cached':>16}{'new tokens':>14}{'cost':>14}"
        )
        for tenant in sorted({key.tenant for key in read_keys(said.file).keys}):
            used = await registry.limits.usage(tenant)
            prompts = f"{used.prompt_tokens:>16}{used.cached_tokens:>16}"
            print(f"{tenant:<24}{used.requests:>10}{prompts}{used.completion_tokens:>14}{used.cost:>14.4f}")
    finally:
        await registry.close()

"""The `tandem` command: its subcommands, each in a module of `tandem.commands`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version

from tandem.garbage import settled, starting

USAGE = """usage: tandem <command> [options]

commands:
  up         start a whole cluster, on this machine or on Ray, and serve until Ctrl-C
  status     show the services of a cluster that `up --ray --detach` left running
  down       end such a cluster
  generate   send a prompt to a running cluster and stream the answer
  drain      have the service on this machine finish what it has, before it is stopped
  keys       add, list or revoke API keys; what their tenants used
  fetch      a model's files from the Hub, S3 or elsewhere, checked by their digests
  doctor     check a running cluster: Redis, workers, a block over every prefill-decode pair, the gateway

`tandem <command> --help` lists a command's options, `tandem --version` says which Tandem this is."""


def main() -> None:
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command == "--version":
        print(f"tandem {version('tandem')}")
        return
    starting()
    run = _command(command)
    settled()
    if run is None:
        print(USAGE, file=sys.stdout if command in ("-h", "--help") else sys.stderr)
        raise SystemExit(0 if command in ("-h", "--help") else 2)
    try:
        run(sys.argv[2:])
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _command(name: str) -> Callable[[list[str]], None] | None:
    """Imported only when requested, so that each command starts fast."""
    if name == "up":
        from tandem.commands.up import main as up

        return up
    if name == "generate":
        from tandem.commands.generate import main as generate

        return generate
    if name == "drain":
        from tandem.commands.drain import main as drain

        return drain
    if name == "keys":
        from tandem.commands.keys import main as keys

        return keys
    if name == "fetch":
        from tandem.commands.fetch import main as fetch

        return fetch
    if name == "status":
        from tandem.commands.detached import status

        return status
    if name == "down":
        from tandem.commands.detached import down

        return down
    if name == "doctor":
        from tandem.commands.doctor import main as doctor

        return doctor
    return None

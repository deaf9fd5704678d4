"""The `tandem` command: its subcommands, each in a module of `tandem.commands`."""

from __future__ import annotations

import os
import signal
import sys
from io import TextIOWrapper
from pkgutil import resolve_name

from tandem import __version__
from tandem.machine.garbage import settled, starting
from tandem.machine.home import provide_home

USAGE = """usage: tandem <command> [options]

commands:
  up         start a whole cluster, on this machine or on Ray, and serve until Ctrl-C
  ps         list the clusters that run on this machine
  down       end them, or with --ray one that `up --ray --detach` left running
  logs       follow what all processes of a cluster on this machine write
  profile    write what a worker's threads do to a file that speedscope opens
  set        change settings of running gateways for a while
  cache      show whose KV workers keep; drop it or pin it
  top        show workers, links and gateways of a running cluster, live
  status     show the services of a cluster on Ray
  chat       talk to a model of a running cluster
  generate   send a prompt to a running cluster and stream the answer
  drain      have the service on this machine finish what it has, before it is stopped
  keys       add, list or revoke API keys; what their tenants used
  models     what a cluster serves; have one name answered by several models, by weights
  fetch      a model's files from the Hub, S3 or elsewhere, checked by their digests
  render     write a cluster.yaml as values of the Helm chart
  doctor     check a running cluster: Redis, workers, a block over every prefill-decode pair, the gateway

`tandem <command> --help` lists a command's options, `tandem --version` says which Tandem this is."""

# Each command's module is imported only when it runs, so that the command starts fast.
COMMANDS = {
    "up": "up:main",
    "ps": "clusters.running:ps",
    "down": "clusters.detached:down",
    "logs": "clusters.running:logs",
    "profile": "profile:main",
    "set": "set:main",
    "cache": "cache:main",
    "top": "top:main",
    "status": "clusters.detached:status",
    "chat": "chat:main",
    "generate": "generate:main",
    "drain": "drain:main",
    "keys": "keys:main",
    "models": "models:main",
    "fetch": "fetch:main",
    "render": "render:main",
    "doctor": "doctor:main",
}


def main() -> None:
    _speak_unicode()
    try:
        try:
            _run()
        finally:
            if sys.stdout:  # None if it was closed before the start
                sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter will flush stdout once more
        raise SystemExit(128 + signal.SIGPIPE) from None


def _speak_unicode() -> None:
    """Starts this command again in Python's UTF-8 mode if the locale allows only ASCII.

    A character that the output's encoding lacks is written as a backslash and a number, and raises no error.
    """
    if sys.getfilesystemencoding() == "ascii" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    if isinstance(sys.stdout, TextIOWrapper):  # None if it was closed before the start
        sys.stdout.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8" if sys.stdin.encoding == "ascii" else None, errors="replace")


def _run() -> None:
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command == "--version":
        print(f"tandem {__version__}")
        return
    if command not in COMMANDS:
        print(USAGE, file=sys.stdout if command in ("-h", "--help") else sys.stderr)
        if command not in ("-h", "--help"):
            raise SystemExit(2)
        return
    starting()
    provide_home()
    run = resolve_name(f"tandem.commands.{COMMANDS[command]}")
    settled()
    run(sys.argv[2:])

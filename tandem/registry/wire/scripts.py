"""The registry's Lua scripts, each complete: the parts that it shares with others stand before it.

Every script takes the key prefix `{namespace}:<format>:` as its one key: the braces keep all keys of a cluster in one
slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files
from types import MappingProxyType

from tandem import __version__

NAMES = (
    "lease", "deregister", "workers", "select", "release", "abandon", "publish", "locate", "heads", "page", "renew",
    "sweep", "check", "take", "settle", "usage", "named", "gateways", "death", "releases",
    "on_demand",
)  # fmt: skip
# The format of keys and rows, and of calls and frames between processes that find each other here. The number rises
# when a process could not work beside one of the last release; tests/registry/test_formats.py compares.
FORMAT = 2
# The shared parts that all scripts begin with, and those that single scripts add.
COMMON = ("keys", "rows", "ledger")
PARTS = {
    "lease": ("formats",), "releases": ("formats",), "select": ("epoch", "costs", "expected"),
    "take": ("epoch", "buckets"), "settle": ("buckets",), "usage": ("buckets",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Script:
    text: str
    sha: str


@cache
def load_scripts(prelude: str = "") -> Mapping[str, Script]:
    """Returns scripts by name. `prelude`: Lua put first; a simulation replaces `redis` in it, for its own clock."""
    return MappingProxyType({name: _load(name, prelude) for name in NAMES})


def key_prefix(namespace: str, number: int = FORMAT) -> str:
    """Returns the prefix of all keys of one format.

    Raises:
        ValueError: the namespace is malformed.
    """
    if not namespace or set(namespace) & set("{}"):
        raise ValueError(f"namespace must be a name without braces, got {namespace!r}")
    return f"{{{namespace}}}:{number}:"


def _load(name: str, prelude: str) -> Script:
    folder = files("tandem.registry") / "lua"
    parts = [(folder / f"{part}.lua").read_text(encoding="utf-8") for part in (*COMMON, *PARTS.get(name, ()), name)]
    text = "".join([prelude, f"local RELEASE = '{__version__}'\n", *parts])
    return Script(text, sha1(text.encode()).hexdigest())

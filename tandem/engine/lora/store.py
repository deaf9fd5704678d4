"""Adapters in memory: the most recently used, within a budget. Other adapters are read again from their folders.

load ──in memory──────────────> Adapter        its users keep it; the budget counts all kept adapters
     └─ read ─ evict the oldest that no user keeps ─ no room: AdapterStoreFull

A path names a folder below a directory, or organisation/adapter[@revision] on a hub; either may be disallowed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from weakref import WeakValueDictionary

from torch import Tensor

from tandem.adapters import AdapterRef
from tandem.checkpoints import HUB, Found, is_hub_name
from tandem.engine.lora.adapter import Adapter
from tandem.engine.lora.peft import Base, fingerprint, read_adapter


class AdapterStoreFull(Exception):
    """The error that all adapters in memory are in use, and there is no room for another one."""


class AdapterStore:
    """The adapters of a model. Any thread may load; loads run one after the other, and only a load waits for another.

    Folders lie below `directory`, if given; `fetch`, if given, gets a path from a hub, of at most the given bytes.
    Weights have the dtype and device of `place` and take at most `budget` bytes.
    """

    def __init__(
        self, directory: Path | None, budget: int, base: Base, place: Tensor,
        fetch: Callable[[str, int], Found] | None = None,
    ) -> None:  # fmt: skip
        self._directory = directory and directory.resolve()
        self._budget, self._base, self._place, self._fetch = budget, base, place, fetch
        self._recent: OrderedDict[str, Adapter] = OrderedDict()
        self._alive: WeakValueDictionary[str, Adapter] = WeakValueDictionary()
        self._dropped = set[str]()  # revisions dropped since the current load began
        self._lock, self._loading = Lock(), Lock()

    def held(self) -> Sequence[str]:
        """Returns the revisions of the adapters in memory."""
        with self._lock:
            return tuple(self._recent)

    def cached(self, revision: str) -> Adapter | None:
        """Returns the adapter if it is in memory, else None, without waiting for a load."""
        with self._lock:
            adapter = self._alive.get(revision)
            if adapter is not None:
                self._keep(adapter)
            return adapter

    def read(self, name: str, path: str) -> AdapterRef:
        """Loads the adapter at `path`, as it is now, as `name`. An adapter of a hub is pinned to its commit.

        Raises:
            ValueError: the adapter or its path is wrong; the message names how.
            AdapterStoreFull: all adapters in memory are in use.
        """
        found = self._find(path)
        return AdapterRef(name, found.name, self._load(found.path, fingerprint(found.path)).revision)

    def get(self, ref: AdapterRef) -> Adapter:
        """Returns the adapter `ref`, loading it if necessary.

        Raises what `read` does, and if the folder has changed.
        """
        adapter = self.cached(ref.revision) or self._load(self._find(ref.path).path, ref.revision)
        if adapter.revision != ref.revision:
            raise ValueError(f"model: adapter {ref.name!r} in {ref.path} has changed since it was loaded")
        return adapter

    def drop(self, revision: str) -> None:
        """Drops the adapter: its memory is freed as soon as its last user ends."""
        with self._lock:
            self._recent.pop(revision, None)
            self._dropped.add(revision)

    def _load(self, folder: Path, revision: str) -> Adapter:
        with self._loading:
            self._dropped.clear()
            adapter = self.cached(revision) or read_adapter(folder, self._base, self._place)
            with self._lock:
                self._alive[adapter.revision] = adapter
                if adapter.revision not in self._dropped:
                    self._keep(adapter)
            return adapter

    def _keep(self, adapter: Adapter) -> None:
        self._recent[adapter.revision] = adapter
        self._recent.move_to_end(adapter.revision)
        oldest = [revision for revision in self._recent if revision != adapter.revision]
        while sum(one.nbytes for one in self._alive.values()) > self._budget:
            if not oldest:
                del self._recent[adapter.revision]
                raise AdapterStoreFull(f"lora_memory: no room for {adapter.nbytes} bytes more: {self._budget} in all")
            del self._recent[oldest.pop(0)]

    def _find(self, path: str) -> Found:
        """Finds the adapter's folder below the directory, else on the hub. Raises ValueError if neither has it."""
        is_name = is_hub_name(path)
        if self._directory and not path.startswith(HUB):
            folder = (self._directory / path).resolve()
            if not folder.is_relative_to(self._directory):
                raise ValueError(f"lora_path: {path!r} is not below {self._directory}")
            if folder.is_dir():
                return Found(folder, path)
            if not is_name or self._fetch is None:
                raise ValueError(f"lora_path: {folder} is no folder")
        if self._fetch is None:
            raise ValueError("lora_path: workers fetch from a hub only where they are started with --lora-hub")
        if not is_name:
            raise ValueError(f"lora_path: {path!r} is not organisation/adapter[@revision] of a hub")
        return self._fetch(path, self._budget)

"""Models made of the files that their workers give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from services.gateway.model.fetch import ModelFolders
from services.gateway.model.served import ServedModel
from services.gateway.settings import GatewaySettings
from services.gateway.text import PARTS_LIMITS, SMALL_BYTES, TokenizerParts, parts_of
from tandem.containment import CallFailed, Sandbox
from tandem.process import WorkThreads
from tandem.registry import ModelKey

log = structlog.get_logger(__name__)


class ModelReader:
    """Call it with a model and the addresses of its workers."""

    def __init__(
        self, settings: GatewaySettings, folders: ModelFolders, sandbox: Sandbox, wall: Callable[[], float]
    ) -> None:
        """`wall`: Unix seconds."""
        self._settings, self._folders, self._sandbox, self._wall = settings, folders, sandbox, wall
        self._thread = WorkThreads("model", 1)
        self._serves = False

    async def __call__(self, key: ModelKey, addresses: Sequence[str]) -> ServedModel:
        """
        Raises:
            Unavailable: no worker gives its files.
            OSError | ValueError: they are malformed.
        """
        folder = await self._folders.folder(key.fingerprint, addresses)
        parsers = self._settings.tool_parser, self._settings.reasoning_parser
        parts = await self._parts(folder)
        made = await self._thread.run(ServedModel.load, folder, key.name, int(self._wall()), *parsers, parts)
        self._serves = True
        return made

    async def _parts(self, folder: Path) -> TokenizerParts | None:
        """Before the first model is served nobody waits, and the helper would only take longer."""
        file = folder / "tokenizer.json"
        if not self._serves or file.stat().st_size < SMALL_BYTES:
            return None
        try:
            return await self._sandbox.call(parts_of, str(file), bounds=PARTS_LIMITS)
        except CallFailed as error:
            log.warning("tokenizer is loaded at once: tokens may be late", file=str(file), reason=str(error))
            return None

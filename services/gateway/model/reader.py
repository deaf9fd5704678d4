"""Makes models of the files that their workers send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from services.gateway.model.fetch import ModelFolders
from services.gateway.model.rendering import ModelHelper
from services.gateway.model.served import CheckedFiles, ServedModel
from services.gateway.model.template_files import read_template
from services.gateway.settings import GatewaySettings
from services.gateway.untrusted import SMALL_BYTES, TokenizerParts
from tandem.containment import Sandbox
from tandem.process import WorkThreads
from tandem.registry import ModelKey


class ModelReader:
    """Reads a model: call it with its key and the addresses of its workers."""

    def __init__(
        self, settings: GatewaySettings, folders: ModelFolders, sandbox: Sandbox, wall: Callable[[], float]
    ) -> None:
        """
        Args:
            sandbox: runs templates and tokenizers of models; its forks stay.
            wall: returns Unix seconds.
        """
        self._settings, self._folders, self._sandbox, self._wall = settings, folders, sandbox, wall
        self._thread = WorkThreads("model", 1)
        self._serves = False

    async def __call__(self, key: ModelKey, addresses: Sequence[str]) -> ServedModel:
        """
        Raises:
            Unavailable: no worker sends the files, or they could not be checked now.
            OSError | ValueError: they are malformed, or exceed their bounds of time or memory.
        """
        folder = await self._folders.folder(key.fingerprint, addresses)
        parsers = self._settings.tool_parser, self._settings.reasoning_parser
        helper = ModelHelper(self._sandbox, key.text)
        template = await self._thread.run(read_template, folder)
        if template is not None:
            template = await helper.checked(template)
        checked = CheckedFiles(helper, template, await self._parts(helper, folder / "tokenizer.json"))
        made = await self._thread.run(ServedModel.load, folder, key.name, int(self._wall()), *parsers, checked)
        self._serves = True
        return made

    async def _parts(self, helper: ModelHelper, file: Path) -> TokenizerParts | None:
        """Returns a large tokenizer in parts; None for the first model, for which no client waits yet."""
        if self._serves and await self._thread.run(_is_large, file):
            return await helper.tokenizer_parts(file)
        await helper.check_tokenizer(file)
        return None


def _is_large(file: Path) -> bool:
    return file.stat().st_size >= SMALL_BYTES

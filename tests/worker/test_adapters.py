"""Adapters of a worker whose folders take long to read: nothing but a load waits for one."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tandem.adapters import AdapterRef
from tandem.engine import Engine, EngineConfig
from tandem.worker import EngineThread
from tandem.worker.errors import SequenceFailed
from tests.engine.peft_folders import make_adapter
from tests.worker.conftest import request


@pytest.fixture
async def thread(demo_model: Path, tmp_path: Path) -> AsyncIterator[EngineThread]:
    config = EngineConfig(
        model_path=demo_model, model_name="demo", num_blocks=16, num_threads=1, lora_dir=tmp_path, lora_memory=2**26
    )
    thread = EngineThread(Engine(config))
    thread.start(lambda outputs: None, lambda error: None)
    yield thread
    thread.close()


class SlowFolder:
    """One whose file is a pipe: reading takes until `end`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._file = folder / "adapter_config.json"
        os.mkfifo(self._file)
        self._pipe = os.open(self._file, os.O_RDWR)

    def end(self) -> None:
        self._file.unlink()
        os.close(self._pipe)


async def test_nothing_else_waits_while_adapters_are_read(
    thread: EngineThread, demo_model: Path, tmp_path: Path
) -> None:
    make_adapter(tmp_path / "quick", demo_model)
    quick = await thread.read_adapter("quick", "quick")
    slow = SlowFolder(tmp_path / "slow")

    def asking(lora: AdapterRef | None) -> asyncio.Task[None]:
        asked = request("r")
        asked.lora = lora
        return asyncio.create_task(thread.prepare(asked, timeout_s=60))

    loads = [asking(AdapterRef("slow", "slow", f"revision {i}")) for i in range(40)]
    await asyncio.sleep(0.3)
    # The loop has to be able to end this test, too, where something blocks it.
    threading.Timer(10, slow.end).start()
    started = time.monotonic()
    thread.drop_adapter("another")
    assert thread.engine.adapters is not None
    assert thread.engine.adapters.held() == (quick.revision,)
    await asking(quick)
    await asyncio.to_thread(len, "x")  # as grammars are compiled
    assert time.monotonic() - started < 5
    for load in loads:
        with pytest.raises(SequenceFailed, match="No such file"):
            await load


async def test_what_is_dropped_while_it_is_read_is_not_kept(
    thread: EngineThread, demo_model: Path, tmp_path: Path
) -> None:
    make_adapter(tmp_path / "one", demo_model)
    ref = await thread.read_adapter("one", "one")
    thread.drop_adapter(ref.revision)
    file = tmp_path / "one" / "adapter_config.json"
    content = file.read_bytes()
    file.unlink()
    os.mkfifo(file)
    pipe = os.open(file, os.O_RDWR)
    asked = request("r")
    asked.lora = ref
    loading = asyncio.create_task(thread.prepare(asked, timeout_s=60))
    await asyncio.sleep(0.3)
    thread.drop_adapter(ref.revision)
    file.unlink()
    file.write_bytes(content)
    os.write(pipe, content)
    os.close(pipe)
    await loading
    assert asked.adapter is not None
    assert thread.engine.adapters is not None
    assert thread.engine.adapters.held() == ()

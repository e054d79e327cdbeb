"""A fake core in a thread, for clients that block."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from tests.fakes.core import FakeCore, fake_model
from tests.fixtures.bbpe import Bbpe, write_bbpe
from tests.fixtures.templates import CHATML, write_template

T = TypeVar("T")


class CoreThread:
    """A fake core with an event loop of its own; its model folder has the BBPE tokenizer and a chat template.

    Args:
        folder: for model folder and socket.
        template: the chat template; None: none.
    """

    def __init__(self, folder: Path, *, template: str | None = CHATML) -> None:
        write_bbpe(folder, Bbpe())
        (folder / "config.json").write_text(json.dumps({"vocab_size": 512}))
        write_template(folder, template)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.core = self.run(self._make(folder))

    async def _make(self, folder: Path) -> FakeCore:
        core = FakeCore(folder / "core.sock", fake_model(str(folder), max_model_len=200_000), step_s=0.0005)
        await core.start()
        return core

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do work in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    def stop(self) -> None:
        """End it."""
        self.run(self.core.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()

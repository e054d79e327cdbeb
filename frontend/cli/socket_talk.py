"""A conversation with a running server over its socket for Python programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from engine_core.wire.sampling import SamplingParams
from frontend.client import Client
from frontend.errors import FrontendError, TalkError
from frontend.model_folder import ModelFolder
from frontend.tokenizer.chat_template import ChatTemplate

# For an engine that still loads.
READY_S: Final = 600.0


class SocketTalk:
    """Asks the engine core itself, with tokenizer and template of the served model folder.

    Args:
        socket: of the server, as `tercet serve` prints it.
        params: of every request.

    Raises:
        TalkError: there is no engine, or the model has no usable template.
    """

    def __init__(self, socket: Path, params: SamplingParams) -> None:
        self._params = params
        try:
            self._client = Client(socket, name="chat")
        except FrontendError as error:
            raise TalkError(str(error)) from error
        try:
            self._client.wait_ready(READY_S)
            self._tokenizer = self._client.tokenizer()
            folder = ModelFolder.open(self._client.model_path, weights=False)
            self._template = ChatTemplate.of(folder, self._tokenizer)
        except FrontendError as error:
            self._client.close()
            raise TalkError(str(error)) from error

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        """The answer, piece by piece; closing the iterator cancels it.

        Raises:
            TalkError: the template or the engine refused, or the engine is gone.
        """
        try:
            ids = self._tokenizer.encode_rendered(self._template.render(messages))
            with self._client.generate(ids, self._params) as answer:
                for delta in answer:
                    yield delta.text
        except FrontendError as error:
            raise TalkError(str(error)) from error

    def close(self) -> None:
        """Leave the engine."""
        self._client.close()

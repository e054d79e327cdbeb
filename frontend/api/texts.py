"""Text to token ids for the endpoints, off the event loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from frontend.errors import ContextTooLong, InvalidRequest, StartRefused, TemplateBroken
from frontend.model_folder import ModelFolder
from frontend.tokenizer.base import Tokenizer
from frontend.tokenizer.chat_template import ChatTemplate
from frontend.tokenizer.longest import least_tokens
from frontend.tokenizer.pool import TextPool


class Texts:
    """Tokenizer, chat template and the threads they work in.

    Args:
        tokenizer: of the model.
        template: of the model; it may have none in it.
        pool: threads.

    Attributes:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, pool: TextPool) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self._pool = pool

    @classmethod
    def of(cls, folder: ModelFolder, tokenizer: Tokenizer) -> Texts:
        """The texts of a model folder.

        Raises:
            StartRefused: its chat template does not parse.
        """
        try:
            return cls(tokenizer, ChatTemplate.of(folder, tokenizer), TextPool())
        except TemplateBroken as error:
            raise StartRefused(f"{folder.template_origin or folder.path}: {error}") from error

    @property
    def has_template(self) -> bool:
        """Whether conversations can be made prompts at all."""
        return self._template.present

    async def encode(self, text: str, *, add_special: bool, room: int) -> list[int]:
        """Ids of a completion's prompt; literals of special tokens in it are special tokens.

        Raises:
            ContextTooLong: its length alone shows that it has `room` tokens or more; nothing finer is found out here.
            TextOverload: too many texts wait.
        """

        def work() -> list[int]:
            self._check_length(text, room, "prompt")
            return self.tokenizer.encode(text, add_special=add_special)

        return await self._pool.run(work)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        room: int,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, object],
    ) -> list[int]:
        """Ids of a conversation; literals of special tokens in its messages are plain text.

        Raises:
            TemplateError, InvalidRequest: no prompt can be made of it.
            ContextTooLong: as of `encode`.
            TextOverload: too many texts wait.
        """

        def work() -> list[int]:
            try:
                rendered = self._template.render(
                    messages,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    variables=variables,
                )
            except RecursionError as error:
                raise InvalidRequest("messages: objects in them are nested too deeply", param="messages") from error
            self._check_length(rendered.text, room, "messages")
            return self.tokenizer.encode_rendered(rendered)

        return await self._pool.run(work)

    def _check_length(self, text: str, room: int, param: str) -> None:
        least = least_tokens(self.tokenizer, text)
        if least >= room:
            raise ContextTooLong(least, room, param, at_least=True)

    def close(self) -> None:
        """Let go of the threads."""
        self._pool.close()

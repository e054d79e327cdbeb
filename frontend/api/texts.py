"""Text to token ids for the endpoints, off the event loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from frontend.errors import InvalidRequest, StartRefused, TemplateBroken
from frontend.model_folder import ModelFolder
from frontend.tokenizer.base import Tokenizer
from frontend.tokenizer.chat_template import ChatTemplate
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

    async def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Ids of a completion's prompt; literals of special tokens in it are special tokens.

        Raises:
            TextOverload: too many texts wait.
        """
        return await self._pool.run(partial(self.tokenizer.encode, text, add_special=add_special))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, object],
    ) -> list[int]:
        """Ids of a conversation; literals of special tokens in its messages are plain text.

        Raises:
            TemplateError, InvalidRequest: no prompt can be made of it.
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
            return self.tokenizer.encode_rendered(rendered)

        return await self._pool.run(work)

    def close(self) -> None:
        """Let go of the threads."""
        self._pool.close()

"""Chat messages to a prompt, by the template that came with the model."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import jinja2

from frontend.errors import InvalidRequest, TemplateBroken, TemplateMissing, TemplateRefused, TemplateTooLarge
from frontend.model_folder import DEFAULT_TEMPLATE, ModelFolder
from frontend.tokenizer.base import Rendered, Tokenizer
from frontend.tokenizer.messages import Message, joined, plain, prepared
from frontend.tokenizer.shield import Shield
from frontend.tokenizer.template_limits import LimitPassed
from frontend.tokenizer.template_sandbox import Refused, TemplateEnvironment, bounded

# What the server itself hands to a template; a request may not stand in for it.
RESERVED: Final = frozenset(
    {
        "add_generation_prompt",
        "bos_token",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "eos_token",
        "messages",
        "pad_token",
        "raise_exception",
        "strftime_now",
        "tokenize",
        "tools",
        "unk_token",
    }
)
WORD_DIGITS: Final = 24
PROBE_TEXT: Final = "8305172649"
# What a template's own code can raise, besides jinja2's errors.
FAULTS: Final = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)


def local_time() -> datetime:
    """Now, where the server stands."""
    return datetime.now().astimezone()


def random_word() -> str:
    """Digits that nobody can foresee."""
    return f"{secrets.randbelow(10**WORD_DIGITS):0{WORD_DIGITS}d}"


class ChatTemplate:
    """The template of a model. Rendering takes the time of the calling thread: use a TextPool.

    Args:
        sources: name -> source; only the one called "default" is used. Empty when the model has none.
        variables: special tokens that templates know by name ("bos_token" ...).
        literals: of special tokens; where they stand in messages they are plain text.
        now: the time, for templates that print it.

    Raises:
        TemplateBroken: the template does not parse.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        variables: Mapping[str, str],
        literals: Iterable[str],
        now: Callable[[], datetime] = local_time,
    ) -> None:
        self._environment = TemplateEnvironment(now)
        self._variables = dict(variables)
        self._literals = tuple(literals)
        source = sources.get(DEFAULT_TEMPLATE)
        self._template = None if source is None else self._compiled(source)
        self._takes: dict[tuple[str, bool], bool] = {}

    @classmethod
    def of(cls, folder: ModelFolder, tokenizer: Tokenizer) -> ChatTemplate:
        """The template of a model folder.

        Raises:
            TemplateBroken: it does not parse.
        """
        return cls(
            folder.chat_templates, variables=tokenizer.template_variables, literals=list(tokenizer.special_tokens)
        )

    @property
    def present(self) -> bool:
        """Whether the model has a template at all."""
        return self._template is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """The prompt for these messages.

        A content list is handed on as a list to templates that read lists for that role, and joined with a line
        break for the others. Arguments of tool calls are parsed: templates get objects.

        Args:
            messages: in OpenAI's wire form.
            add_generation_prompt: open the assistant's turn at the end.
            continue_final_message: leave the last message open instead, so that the answer continues it.
            variables: further names for the template.

        Raises:
            TemplateMissing: the model has no template.
            TemplateRefused: the template's own refusal, in its words.
            TemplateBroken: the template failed on these messages.
            TemplateTooLarge: it took too many steps, too long, or made too much.
            InvalidRequest: a message has not the form that it must have, or a variable is the server's own.
        """
        given = dict(variables or {})
        reserved = sorted(given.keys() & (RESERVED | self._variables.keys()))
        if reserved:
            raise InvalidRequest(
                f"chat_template_kwargs.{reserved[0]}: is the server's own and cannot be set",
                param="chat_template_kwargs",
            )
        if self._template is None:
            raise TemplateMissing(
                "this model has no chat template; use completions, or start the server with --chat-template"
            )
        shield = Shield(self._literals, random_word())
        ready = [self._shaped(message) for message in prepared(messages)]
        covered = [_covered(shield, message) for message in ready]
        tag = _open_end(covered, random_word()) if continue_final_message else None
        values = {"messages": covered, "add_generation_prompt": add_generation_prompt and tag is None}
        text = self._run({**shield.cover(plain(given)), **values})
        return shield.uncover(text if tag is None else _cut(text, tag))

    def _compiled(self, source: str) -> jinja2.Template:
        try:
            return self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateBroken(f"chat template, line {error.lineno}: {error.message}") from error
        except (RecursionError, jinja2.TemplateError) as error:
            raise TemplateBroken(f"chat template: {error}") from error

    def _run(self, values: Mapping[str, Any]) -> str:
        assert self._template is not None, "render looked for it"
        given = {**self._variables, "documents": None, "tools": None, **values}
        try:
            with self._environment.budget():
                return bounded(self._template.generate(given))
        except Refused as error:
            raise TemplateRefused(str(error)) from error
        except LimitPassed as error:
            raise TemplateTooLarge(str(error)) from error
        except OverflowError as error:
            raise TemplateTooLarge(f"the chat template: {error}") from error
        except (jinja2.TemplateError, *FAULTS) as error:
            raise TemplateBroken(f"the chat template failed: {type(error).__name__}: {error}") from error

    def _shaped(self, message: Message) -> Message:
        """The message with its content in the form that the template reads: a text or a list."""
        content, role = message.get("content"), str(message.get("role"))
        if isinstance(content, list) and not self._reads(role, as_list=True):
            return {**message, "content": joined(content)}
        only_lists = isinstance(content, str) and not self._reads(role, as_list=False)
        if only_lists and self._reads(role, as_list=True):
            return {**message, "content": [{"type": "text", "text": content}]}
        return message

    def _reads(self, role: str, *, as_list: bool) -> bool:
        """Whether the template prints the content of this role when it is given in this form; tried once."""
        key = (role, as_list)
        if key not in self._takes:
            self._takes[key] = self._try(role, as_list)
        return self._takes[key]

    def _try(self, role: str, as_list: bool) -> bool:
        content = [{"type": "text", "text": PROBE_TEXT}] if as_list else PROBE_TEXT
        for messages in _probes({"role": role, "content": content}):
            try:
                text = self._run({"messages": messages, "add_generation_prompt": False})
            except (TemplateRefused, TemplateBroken, TemplateTooLarge):
                continue
            # A list that is printed as Python or JSON prints it shows its keys.
            return PROBE_TEXT in text and f"text': '{PROBE_TEXT}" not in text and f'text": "{PROBE_TEXT}' not in text
        return False


def _probes(message: Message) -> list[list[Message]]:
    """Conversations in which templates accept the message, depending on its role."""
    user = {"role": "user", "content": "."}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
    match message["role"]:
        case "user":
            return [[message]]
        case "system":
            return [[message, user]]
        case "tool":
            asked = {"role": "assistant", "content": "", "tool_calls": [call]}
            return [[user, asked, {**message, "tool_call_id": "a", "name": "f"}]]
        case _:
            return [[user, message], [user, message, user]]


def _covered(shield: Shield, message: Message) -> Message:
    # The role is compared by templates, and is no text.
    return {key: value if key == "role" else shield.cover(value) for key, value in message.items()}


def _open_end(messages: list[Message], tag: str) -> str:
    """Put a tag behind the last message's text, and give it."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    # The space behind the tag shows whether the template strips the text.
    if isinstance(content, str):
        last["content"] = content + tag + " "
    elif isinstance(content, list) and content:
        content[-1]["text"] += tag + " "
    else:
        raise InvalidRequest("continue_final_message: the last message has no text to continue", param="messages")
    return tag


def _cut(text: str, tag: str) -> str:
    place = text.rfind(tag)
    if place < 0:
        raise TemplateBroken("continue_final_message: the chat template does not print the last message")
    kept = text[:place]
    return kept if text.startswith(" ", place + len(tag)) else kept.rstrip()

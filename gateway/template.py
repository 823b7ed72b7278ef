"""Chat messages -> the prompt's text, by the model's own chat template (Jinja, as Hugging Face models carry it).

The template is part of the model's files, not of the request; it still runs in Jinja's sandbox. Messages are plain
values to it: whatever they contain, it is not executed.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import ApiError
from gateway.openai_api import Message

SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """`special` maps bos_token and its like to their text. Raises ValueError for a template that does not compile."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the chat template does not compile: {error}") from error
        self._template.globals = dict(self._template.globals)  # each rendering copies it: from a chain of maps, slowly
        self._special = dict(special)

    @classmethod
    def of(cls, folder: Path) -> "ChatTemplate":
        """chat_template.jinja, else tokenizer_config.json's `chat_template`. Raises ValueError."""
        config = json.loads((folder / "tokenizer_config.json").read_text())
        file = folder / "chat_template.jinja"
        source: Any = file.read_text() if file.exists() else config.get("chat_template")
        if isinstance(source, list):  # several by name
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if not isinstance(source, str):
            raise ValueError(f"{folder} has no chat template: give chat_template.jinja")
        return cls(source, {name: text for name in SPECIAL if (text := token_text(config.get(name))) is not None})

    def render(self, messages: Sequence[Message]) -> str:
        """The text that the model is to go on from. Raises ApiError where the template refuses the messages."""
        try:
            return self._template.render(
                messages=[{"role": message.role, "content": message.text} for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special,
            )
        except (TemplateError, TypeError) as error:
            raise ApiError("invalid_request", f"messages: this model's template says: {error}", "messages") from None


def token_text(token: Any) -> str | None:
    """A special token's text: tokenizer_config.json has it bare or in an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)

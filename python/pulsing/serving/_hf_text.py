"""Between a Hugging Face tokenizer and text: templates in, tokens to bytes out."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from pulsing.serving._errors import RequestError
from pulsing.serving._text import ByteDetokenizer, WindowDetokenizer

__all__ = ["PLAIN_STOPS", "PLAIN_TEMPLATE", "TextCodec"]

_log = logging.getLogger("pulsing.serving")

# For models that have no chat template (gpt2): a dialogue that a base model continues. Documented in the guide.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n{% endfor %}Assistant:"
)
# Left alone, a base model goes on to write the user's next line too.
PLAIN_STOPS = ("\nUser:",)


def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the other bytes for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + at): byte for at, byte in enumerate(others)})
    return table


class TextCodec:
    """Prompts to ids and ids to text, for one tokenizer.

    Args:
        tokenizer: a tokenizer of transformers.
        chat_template: Jinja text, or a file that holds it; the tokenizer's own when ``None``.
        model: the model's name, for messages.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None, model: str) -> None:
        self._tokenizer = tokenizer
        self.implied_stops: tuple[str, ...] = ()
        """Stop strings that belong to the template."""
        if chat_template is not None:
            self._template: str | None = _template_text(chat_template)
        elif tokenizer.chat_template is None:
            _log.warning(
                '%s has no chat template: using a plain one ("User: ..." lines, then "Assistant:"); '
                "give a better one with --chat_template FILE",
                model,
            )
            self._template = PLAIN_TEMPLATE
            self.implied_stops = PLAIN_STOPS
        else:
            self._template = None
        self._special = frozenset(tokenizer.all_special_ids)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._added = {int(i): str(token) for i, token in added.items()}
        self._special |= {i for i, token in added.items() if getattr(token, "special", False)}
        self._bytes = _byte_of_char() if _is_byte_level(tokenizer) else None
        self._known: dict[int, bytes] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_args: Mapping[str, Any],
        *,
        answer: bool = True,
        special: bool = False,
    ) -> list[int]:
        """Ids of a chat.

        Args:
            messages: in a template's terms.
            template_args: extra variables for the template.
            answer: end with the beginning of the assistant's answer.
            special: add what the tokenizer puts around a text, which templates write themselves.

        Raises:
            RequestError: 400 when the template refuses the messages.
        """
        # transformers brings it, and it is no dependency of ours.
        jinja2: Any = import_module("jinja2")
        reserved = {"messages", "conversation", "tokenize", "add_generation_prompt", "chat_template", "return_dict"}
        extra = {name: value for name, value in template_args.items() if name not in reserved}
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=answer,
                **extra,
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise RequestError(
                400, f"the model's chat template refuses these messages: {str(error)[:300]}", "messages"
            ) from None
        return self.encode(text, special=special)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Ids of a text; ``special`` adds what the tokenizer puts around a text (a begin token)."""
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token by itself, special ones by name; what is no text of its own is shown as U+FFFD."""
        names = self._tokenizer.convert_ids_to_tokens(list(ids))
        return [
            str(name or "") if token in self._special else self.token_bytes(token).decode("utf-8", "replace")
            for token, name in zip(ids, names, strict=True)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special ones by name."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def first_ids(self) -> list[int]:
        """What an empty prompt is: the begin token, or a model without one its end token."""
        for token in (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id):
            if token is not None:
                return [int(token)]
        raise RequestError(400, "prompt is empty, and this model has no begin token to start from", "prompt")

    def detokenizer(self, prompt: Sequence[int]) -> ByteDetokenizer | WindowDetokenizer:
        """A fresh detokenizer for an answer to ``prompt``."""
        if self._bytes is not None:
            return ByteDetokenizer(self.token_bytes)
        return WindowDetokenizer(self._decode, prompt[-8:])

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; empty for special ones."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._bytes_of(token)
        return known

    def _bytes_of(self, token: int) -> bytes:
        if token in self._special:
            return b""
        if token in self._added:
            return self._added[token].encode()
        if self._bytes is None:
            return self._decode([token]).encode()
        # Ids beyond the vocabulary exist where the embedding is padded; they are no text.
        name = self._tokenizer.convert_ids_to_tokens(token) or ""
        table = self._bytes
        return b"".join(bytes((table[char],)) if char in table else char.encode() for char in name)

    def _decode(self, ids: list[int]) -> str:
        # Cleaning up spaces would change text that was given out already.
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _template_text(value: str) -> str:
    if "{" in value:
        return value
    path = Path(value)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"chat_template {value!r} is neither Jinja text nor a readable file: {error.strerror or error}"
        ) from None


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    parts = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = {part.get("type") for part in parts}
    return "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}

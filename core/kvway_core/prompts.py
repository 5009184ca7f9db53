"""Messages and text to token ids, exactly as the model was trained to see them.

The chat template and the tokenizer come from the model's folder, never from a request. Rendering
and tokenizing agree, id for id, with transformers' `apply_chat_template`, without importing it: a
router must stay small.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from kvway_core.api import ChatMessage
from kvway_core.chat_messages import plain_message
from kvway_core.chat_template import ChatTemplate
from kvway_core.errors import ConfigError, InvalidRequest
from kvway_core.images import PlacedImage
from kvway_core.piece_cache import DEFAULT_CACHE_BYTES
from kvway_core.token_bounds import token_bound
from kvway_core.token_bytes import TokenBytes
from kvway_core.tokenizing import AUTO, TextReader, TextTokenizer

_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class PromptEncoder:
    """Turns prompts into token ids, and token ids into text, for one model.

    All methods may be called from several threads at once.

    Attributes:
        eos_token_ids: The tokens that end an answer.
        max_model_len: Tokens of prompt and answer together; None if the model does not say.
        vocab_size: Token ids are below this.
        has_chat_template: Whether `encode_chat` works.
        token_bound: How few tokens a text can have; None if nothing is certain.
        texts: What tokenizes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        texts: TextTokenizer | None = None,
        template: ChatTemplate | None,
        eos_token_ids: frozenset[int],
        max_model_len: int | None,
        vocab_size: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.texts = TextTokenizer(tokenizer) if texts is None else texts
        self.eos_token_ids = eos_token_ids
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.token_bound = token_bound(tokenizer)

    @classmethod
    def load(
        cls, model_dir: Path, *, library: str = AUTO, cache_bytes: int = DEFAULT_CACHE_BYTES
    ) -> PromptEncoder:
        """Reads a model's folder: tokenizer.json, its configs, its chat template if it has one.

        Args:
            model_dir: The folder.
            library: What tokenizes, as for `TextTokenizer`.
            cache_bytes: Memory for texts whose tokens are known, likewise.

        Raises:
            ConfigError: Naming the file that is missing or broken.
        """
        path = model_dir / "tokenizer.json"
        tokenizer = _load_tokenizer(path)
        tokenizer_config = _read_json(model_dir / "tokenizer_config.json")
        model_config = _read_json(model_dir / "config.json")
        generation_config = _read_json(model_dir / "generation_config.json")
        special_tokens = _special_tokens(
            {**_read_json(model_dir / "special_tokens_map.json"), **tokenizer_config}
        )
        eos = generation_config.get("eos_token_id", model_config.get("eos_token_id"))
        eos_token_ids = set(eos if isinstance(eos, list) else [eos])
        eos_token_ids.add(tokenizer.token_to_id(special_tokens.get("eos_token", "")))
        return cls(
            tokenizer,
            texts=TextTokenizer(tokenizer, path=path, library=library, cache_bytes=cache_bytes),
            template=_load_template(model_dir, tokenizer_config, special_tokens),
            eos_token_ids=frozenset(token for token in eos_token_ids if isinstance(token, int)),
            max_model_len=_size(model_config, "max_position_embeddings", "n_positions"),
            vocab_size=_size(model_config, "vocab_size") or tokenizer.get_vocab_size(),
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """Looks up the bytes that a token stands for."""
        return TokenBytes(self._tokenizer)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, object] | None = None,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Returns the token ids of a conversation.

        Args:
            messages: As for `render_chat`, like all but the last argument.
            tools: What the assistant may call.
            add_generation_prompt: Whether they end where the assistant begins to answer.
            continue_final_message: Whether they end inside the last message.
            kwargs: Variables of the template.
            add_special_tokens: Whether the tokenizer puts its own (BOS) around it; most templates
                write them.

        Raises:
            InvalidRequest: As `render_chat`.
        """
        text = self.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            kwargs=kwargs,
        )
        return self.encode_text(text, add_special_tokens=add_special_tokens)

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, object] | None = None,
        with_images: bool = False,
    ) -> str:
        """Returns a conversation as the text that the model sees.

        Args:
            messages: The conversation.
            tools: What the assistant may call.
            add_generation_prompt: Whether the text ends where the assistant begins to answer, or
                behind the last message.
            continue_final_message: Whether the text ends with the content of the last message, so
                that the answer goes on with it; no answer begins then.
            kwargs: Values for variables of the template that requests may set.
            with_images: Whether messages may have images, for which the template has a place.

        Raises:
            InvalidRequest: If the template refuses the messages or the variables, the model has no
                template, or a message has a part other than text and images.
        """
        if self._template is None:
            raise InvalidRequest(
                "This model has no chat template; use /v1/completions.", param="messages"
            )
        template = self._template
        plain = [
            plain_message(
                index,
                message,
                parts_allowed=template.takes_parts,
                images_allowed=with_images and template.takes_images,
            )
            for index, message in enumerate(messages)
        ]
        if continue_final_message:
            return template.render_open(plain, tools=tools, kwargs=kwargs)
        return template.render(
            plain, tools=tools, add_generation_prompt=add_generation_prompt, kwargs=kwargs
        )

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text.

        Args:
            text: Any text; special tokens written in it become those tokens.
            add_special_tokens: Whether the tokenizer puts its own (BOS) around it.
        """
        return self.texts.encode(text, add_special_tokens=add_special_tokens)

    def read_text(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        images: Sequence[PlacedImage] = (),
    ) -> TextReader:
        """Returns a reader that tokenizes a text from the front, as far as it is asked for.

        Args:
            text: As for `encode_text`.
            add_special_tokens: As for `encode_text`.
            images: Those in it, in order.
        """
        return self.texts.read(text, add_special_tokens=add_special_tokens, images=images)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids; broken UTF-8 becomes U+FFFD, unknown ids nothing.

        Raises:
            OverflowError: If an id does not fit 32 unsigned bits.
        """
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


class Detokenizer:
    """Turns the tokens of one answer into text as they come, never splitting a character.

    The pieces put together are the text of all tokens together. Two decoders make exceptions: one
    with byte fallback, where a broken byte after a whole character changes that character, and
    any, where more than `_WINDOW` tokens in a row add no whole character.

    A token's text may depend on the tokens before it, so it is decoded after those of the piece
    before: [0, num_context) of the window is text already sent, the rest is not sent yet.

    Invariants:
        1. At most `_WINDOW` tokens are held, whatever is pushed.
    """

    __slots__ = ("_encoder", "_num_context", "_num_sent", "_skip_special_tokens", "_window")

    _WINDOW = 32
    _LONGEST_CHARACTER = 4

    def __init__(self, encoder: PromptEncoder, *, skip_special_tokens: bool = True) -> None:
        self._encoder = encoder
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._num_context = 0
        self._num_sent = 0

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes, which may be empty."""
        self._window.append(token_id)
        text = self._decode()
        whole = text.rstrip("\ufffd")
        if len(self._window) >= self._WINDOW:
            return self._push_overdue(text)
        piece = whole[self._num_sent :]
        self._num_sent += len(piece)
        if piece and len(whole) == len(text):
            self._forget(self._num_context)
        return piece

    def flush(self) -> str:
        """Returns what is still held back, broken characters as U+FFFD; call it at the end."""
        piece = self._decode()[self._num_sent :]
        self._num_sent += len(piece)
        return piece

    def _push_overdue(self, text: str) -> str:
        """Returns all but a last character that may still be incomplete, and frees the window."""
        num_held = 1 if text.endswith("\ufffd") else 0
        piece = text[self._num_sent : len(text) - num_held]
        self._forget(len(self._window) - self._LONGEST_CHARACTER)
        self._num_sent = max(0, self._num_sent - num_held)
        return piece

    def _forget(self, num_tokens: int) -> None:
        """Drops the first tokens of the window; what is left has been sent."""
        del self._window[:num_tokens]
        self._num_context = len(self._window)
        self._num_sent = len(self._decode())

    def _decode(self) -> str:
        """Returns the text of the window."""
        return self._encoder.decode(self._window, skip_special_tokens=self._skip_special_tokens)


def _load_tokenizer(path: Path) -> Tokenizer:
    """Returns the tokenizer in a file, without truncation or padding.

    Raises:
        ConfigError: If there is none.
    """
    if not path.is_file():
        raise ConfigError([f"{path.parent} is not a model folder: it has no {path.name}"])
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as exc:
        raise ConfigError([f"{path} cannot be read: {exc}"]) from exc
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> dict[str, object]:
    """Returns the object in a file, empty when there is no such file.

    Raises:
        ConfigError: If the file is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        raise ConfigError([f"{path} cannot be read: {exc}"]) from exc
    if not isinstance(content, dict):
        raise ConfigError([f"{path} is not a JSON object"])
    return content


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Returns the named special tokens, each given as text or as an object with its content."""
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _load_template(
    model_dir: Path, tokenizer_config: Mapping[str, object], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """Returns the model's chat template: its own file first, then the tokenizer's config.

    Raises:
        ConfigError: If it cannot be read or compiled.
    """
    sources: dict[str, str] = {}
    configured = tokenizer_config.get("chat_template")
    if isinstance(configured, str):
        sources["default"] = configured
    elif isinstance(configured, list):
        sources.update({entry["name"]: entry["template"] for entry in configured})
    extra = sorted((model_dir / "additional_chat_templates").glob("*.jinja"))
    for path in [model_dir / "chat_template.jinja", *extra]:
        if path.is_file():
            name = "default" if path.stem == "chat_template" else path.stem
            sources[name] = path.read_text(encoding="utf-8")
    if "default" not in sources:
        return None
    return ChatTemplate(
        sources["default"], tool_source=sources.get("tool_use"), variables=special_tokens
    )


def _size(config: Mapping[str, object], *names: str) -> int | None:
    """Returns a positive whole number of a model's config, None if there is none.

    Args:
        config: The config; a model of more than text has a part for text of its own.
        names: What the number may be called: GPT-2 has other names than most.
    """
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for name in names:
            value = part.get(name)
            if isinstance(value, int) and value > 0:
                return value
    return None

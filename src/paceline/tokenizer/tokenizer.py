"""The tokenizer of a checkpoint: encodes texts and conversations, and decodes tokens, also one at a time as a model generates them."""

import json
import re
from codecs import utf_8_decode
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, RequestError, library_errors, memory_errors, shortened
from paceline.small_files import write_whole
from paceline.tokenizer.backend import TokenizerBackend
from paceline.tokenizer.chat_template import ChatTemplate
from paceline.tokenizer.control_text import ControlTexts
from paceline.tokenizer.files import holds_template_file, open_pretrained
from paceline.tokenizer.gguf import GgufTokenizer, read_gguf_tokenizer

_MAX_WINDOW_TOKENS = 32
_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A piece for one byte of a character that is not in the vocabulary."""


class Tokenizer:
    """The tokenizer of a checkpoint.

    Attributes:
        vocab_size: the largest id + 1; a model's weight matrices may have more rows.
        special_token_ids: ids of control tokens.
        end_token_ids: ids that end an answer, if the tokenizer specifies them, as that of a GGUF file does.
        notices: lines to show to the user.
    """

    def __init__(self, pretrained: Any, *, end_token_ids: Sequence[int] = (), notices: Sequence[str] = ()) -> None:
        self._pretrained = pretrained
        self.end_token_ids = tuple(end_token_ids)
        self.notices = tuple(notices)
        self._backend = TokenizerBackend(pretrained.backend_tokenizer)
        self.vocab_size = max(self._backend.vocabulary.values()) + 1
        self.special_token_ids = self._backend.special_token_ids
        self._templates: dict[str, ChatTemplate] = {}
        self._rendered: dict[tuple[str, tuple[str, ...]], bool] = {}

    @classmethod
    @memory_errors("the tokenizer")
    def open(cls, directory: Path) -> "Tokenizer":
        """Open the tokenizer of a checkpoint directory or a GGUF file; Python code in a checkpoint is never run.

        Raises:
            CheckpointError: there is no tokenizer, or it cannot be read.
            CapacityError: it does not fit in memory.
        """
        if directory.suffix.lower() == ".gguf" and not directory.is_dir():
            from paceline.models.gguf.file import open_gguf

            return cls.from_gguf(open_gguf(directory).metadata, directory)
        try:
            return cls(open_pretrained(directory))
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error}" if str(directory) not in str(error) else str(error)) from error

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], source: object) -> "Tokenizer":
        """Build the tokenizer that the metadata of a GGUF file describes; `source` is the file, for error texts.

        Raises:
            CheckpointError: the metadata describe no known kind of tokenizer.
        """
        parts = read_gguf_tokenizer(metadata, source)
        return cls(_GgufPretrained(parts), end_token_ids=parts.end_token_ids, notices=[parts.notice] if parts.notice else [])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text; special tokens in it become their ids.

        Raises:
            RequestError: the tokenizer cannot encode the text.
        """
        if half := _SURROGATE.search(text):
            raise RequestError(f"the text contains {half[0]!r}, half of a surrogate pair and not a character: send text without it")
        with library_errors("the model's tokenizer cannot encode this text; send another", RequestError):
            ids: list[int] = self._pretrained.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return ids

    @cached_property
    def max_piece_chars(self) -> int:
        """Characters of the longest piece; a text has at least its length divided by this many tokens."""
        return max(map(len, self._backend.vocabulary))

    @cached_property
    def control_texts(self) -> ControlTexts:
        """Finds control tokens in texts, and encodes texts in which they are ordinary text."""
        return ControlTexts(self._pretrained.backend_tokenizer, self._backend.vocabulary)

    def encode_as_text(self, text: str) -> list[int]:
        """Encode a text in which the texts of control tokens are ordinary text; errors as for `encode`."""
        escaped = self.control_texts.escape([text], others=[])
        if not escaped.is_needed:
            return self.encode(text, add_special_tokens=False)
        return self.control_texts.encode(escaped, escaped.unescape_json(escaped.value[0]))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode ids; ids outside the vocabulary are skipped.

        In a run of byte pieces (<0xE4>), each byte that is not part of a valid character becomes a replacement character.

        Source: SentencePiece's decoder. The tokenizers library replaces the whole run if one byte is invalid, which would change text
            that was already streamed.
        """
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        if _REPLACEMENT in text and self.has_byte_pieces:
            hidden = self.special_token_ids if skip_special_tokens else ()
            pieces = [piece for token_id in ids if (piece := self.piece(token_id)) and token_id not in hidden]
            text = self._backend.join(_replace_invalid_bytes(pieces))
        return text

    def piece(self, token_id: int) -> str:
        """Return a token's piece, its spelling in the vocabulary ("Ġthe", "<0x0A>"); empty for ids outside the vocabulary."""
        return self._backend.id_to_token(token_id) or ""

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer can render messages."""
        return bool(self._template_source())

    @property
    def has_byte_pieces(self) -> bool:
        """Whether characters outside the vocabulary are encoded as pieces like <0xE4>, one a byte."""
        return self._backend.has_byte_pieces

    def to_json(self) -> str:
        """Return the text of a tokenizer.json, with all tokens added after loading.

        Raises:
            RequestError: the library cannot write it.
        """
        return self._backend.to_json()

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `open` and transformers read.

        Raises:
            RequestError: as `to_json`.
        """
        named = {name: text for name, text in self._pretrained.special_tokens_map.items() if isinstance(text, str)}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
        if template := self.template_source():
            settings["chat_template"] = template
        write_whole(directory / "tokenizer.json", self.to_json())
        write_whole(directory / "tokenizer_config.json", json.dumps(settings, indent=1) + "\n")

    def template_uses(self, name: str) -> bool:
        """Return whether the chat template's text contains a variable such as "tools" or "enable_thinking"."""
        template = self._chat_template(has_tools=name == "tools")
        return template is not None and template.mentions(name)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> list[int]:
        """Render a conversation with the chat template and encode it; arguments and errors as for `chat_text`."""
        return self.encode(self.chat_text(messages, **arguments), add_special_tokens=False)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        max_model_len: int | None = None,
    ) -> str:
        """Render a conversation with the chat template; the text contains the template's special tokens.

        Args:
            tools, options: as for `ChatTemplate.render`. If the model has several templates, `tool_use` renders conversations with tools.
            max_model_len: largest number of tokens of a prompt; limits the length of the text (`chat_template.max_rendered_chars`).

        Raises:
            RequestError: the tokenizer has no chat template, or its template rejects the messages, fails, or exceeds its limits.
            BackendUnavailableError: no process can be started to render it.
        """
        template = self._chat_template(has_tools=bool(tools))
        if template is None:
            raise RequestError("this model has no chat template, so it cannot take messages; send a plain prompt", parameter="messages")
        if not messages:
            raise RequestError("messages is empty; send at least one message", parameter="messages")
        return template.render(
            messages, tools=tools, options=options, add_generation_prompt=add_generation_prompt, max_model_len=max_model_len
        )

    def template_renders(self, texts: Sequence[str], messages: Sequence[Mapping[str, Any]], *, has_tools: bool = False) -> bool:
        """Return whether the rendered conversation contains all of `texts`; the result is cached by these.

        Also true if the template rejects the conversation even without these texts, because then nothing is known about them.
        """
        template = self._chat_template(has_tools=has_tools)
        if template is None:
            return True
        key = (self.template_source(has_tools=has_tools), tuple(texts))
        if key not in self._rendered:
            self._rendered[key] = _is_rendered(template, texts, messages)
        return self._rendered[key]

    def check_chat_template(self) -> None:
        """Check that the chat template, if there is one, compiles.

        Raises:
            CheckpointError: it does not compile.
            BackendUnavailableError: no process can be started to compile it.
        """
        try:
            template = self._chat_template()
        except RequestError as error:
            raise CheckpointError(str(error)) from error
        if template is not None:
            template.check()

    def template_source(self, *, has_tools: bool = False) -> str:
        """Return the source of the chat template; empty if there is none.

        Raises:
            RequestError: it is not a string.
        """
        source = self._template_source(has_tools=has_tools)
        if source and not isinstance(source, str):
            raise RequestError(f"the model's chat template is {shortened(source)}, not a string: send plain prompts", parameter="messages")
        return source or ""

    def _chat_template(self, *, has_tools: bool = False) -> ChatTemplate | None:
        source = self.template_source(has_tools=has_tools)
        if source and source not in self._templates:
            self._templates[source] = ChatTemplate(source, self._pretrained.special_tokens_map)
        return self._templates.get(source)

    def _template_source(self, *, has_tools: bool = False) -> Any:
        source = self._pretrained.chat_template
        if not isinstance(source, Mapping):
            return source
        return (has_tools and source.get("tool_use")) or source.get("default", "")  # several by name

    def added_token_id(self, text: str) -> int | None:
        """Return the id of the added token with exactly this text; None if there is none."""
        return self._backend.added_token_ids.get(text)

    def detokenizer(self, shown_token_ids: Collection[int] = ()) -> "IncrementalDetokenizer":
        """Return a detokenizer for one stream of tokens.

        Args:
            shown_token_ids: special tokens that become part of the text.
        """
        return IncrementalDetokenizer(self, shown_token_ids)


def _is_rendered(template: ChatTemplate, texts: Sequence[str], messages: Sequence[Mapping[str, Any]]) -> bool:
    try:
        rendered = template.render(messages, add_generation_prompt=True)
        return all(text in rendered for text in texts)
    except RequestError:
        pass
    try:
        template.render([message for message in messages if message.get("content") not in texts], add_generation_prompt=True)
    except RequestError:
        return True
    return False


def _replace_invalid_bytes(pieces: Sequence[str]) -> list[str]:
    """Replace each byte piece that is not part of a valid character by a replacement character."""
    valid: list[str] = []
    run = bytearray()
    for piece in (*pieces, ""):
        if _BYTE_PIECE.fullmatch(piece):
            run.append(_byte(piece))
            continue
        for character in run.decode("utf-8", "surrogateescape"):  # an invalid byte becomes a surrogate
            is_invalid = "\udc80" <= character <= "\udcff"
            valid += [_REPLACEMENT] if is_invalid else [f"<0x{byte:02X}>" for byte in character.encode()]
        run.clear()
        valid.append(piece)
    return valid[:-1]


def _num_open_bytes(pieces: Sequence[str]) -> int:
    """Return the number of bytes at the end that may become a character with the next pieces, at most three."""
    run = bytearray()
    for piece in reversed(pieces[-3:]):
        if not _BYTE_PIECE.fullmatch(piece):
            break
        run.insert(0, _byte(piece))
    _, num_closed = utf_8_decode(run, "replace", False)  # False: an incomplete character at the end is not consumed
    return len(run) - num_closed


def _byte(piece: str) -> int:
    return int(piece[3:5], 16)


def holds_chat_template(path: Path) -> bool:
    """Return whether the files of a checkpoint hold a chat template, without opening its tokenizer.

    Raises:
        CheckpointError: a file is damaged.
    """
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        from paceline.models.gguf.file import open_gguf

        return any(name.startswith("tokenizer.chat_template") for name in open_gguf(path).metadata)
    return holds_template_file(path)


class _GgufPretrained:
    """The tokenizer of a GGUF file with the attributes that `Tokenizer` uses of a transformers tokenizer."""

    def __init__(self, parts: GgufTokenizer) -> None:
        self.backend_tokenizer = parts.backend
        self.chat_template = parts.chat_templates
        self.special_tokens_map = parts.named_tokens

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]:
        # Unlike `encode`, this releases the GIL.
        ids: list[int] = self.backend_tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids


class IncrementalDetokenizer:
    """Decodes a stream of tokens; all returned texts together are `Tokenizer.decode` of the tokens that are not hidden.

    Special tokens other than `shown_token_ids` are hidden.

    Only a window of the last tokens is decoded. It begins at a character boundary, one token before the text not yet returned, because a
    tokenizer may drop the space before its first token.
    """

    __slots__ = ("_has_byte_pieces", "_hidden", "_num_returned", "_parts", "_read_from", "_tokenizer", "_window")

    def __init__(self, tokenizer: Tokenizer, shown_token_ids: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids - frozenset(shown_token_ids)
        self._has_byte_pieces = tokenizer.has_byte_pieces
        self._window: list[int] = []
        self._read_from = 0  # index in the window of the first token whose text was not returned yet
        self._num_returned = 0  # number of characters of the window's text that were returned
        self._parts: list[str] = []

    def copy(self) -> "IncrementalDetokenizer":
        """Return a detokenizer in the same state, without the text returned so far."""
        other = IncrementalDetokenizer(self._tokenizer)
        other._hidden = self._hidden
        other._window = list(self._window)
        other._read_from, other._num_returned = self._read_from, self._num_returned
        return other

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._parts)

    def push(self, token_id: int) -> str:
        """Append a token; return the text that is final with it, which is empty while a character is incomplete."""
        piece = self._tokenizer.piece(token_id)
        if token_id in self._hidden or not piece:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        num_open = self._num_open(text)
        new = text[self._num_returned : len(text) - num_open]
        if not num_open:
            self._start_window_at(self._read_from)
        else:
            self._num_returned += len(new)
            if len(self._window) > _MAX_WINDOW_TOKENS:
                self._shorten_window(text)
        self._parts.append(new)
        return new

    def flush(self) -> str:
        """Return the rest of the text, with replacement characters for incomplete characters."""
        new = self._decode(self._window)[self._num_returned :]
        self._window.clear()
        self._read_from = self._num_returned = 0
        self._parts.append(new)
        return new

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)  # special tokens are excluded when the window is filled

    def _num_open(self, text: str) -> int:
        """Return the number of characters at the end that the next token may change: incomplete bytes, or a replacement character."""
        if self._has_byte_pieces:
            return _num_open_bytes([self._tokenizer.piece(token_id) for token_id in self._window[-3:]])
        return int(text.endswith(_REPLACEMENT))

    def _start_window_at(self, first: int) -> None:
        del self._window[:first]
        self._read_from = len(self._window)
        self._num_returned = len(self._decode(self._window))

    def _shorten_window(self, text: str) -> None:
        """Shorten the window in a long run of invalid bytes. Four tokens contain all bytes of an incomplete character."""
        num_pending = len(text) - self._num_returned
        del self._window[:-4]
        self._read_from = 0
        self._num_returned = max(len(self._decode(self._window)) - num_pending, 0)

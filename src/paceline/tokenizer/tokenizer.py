"""The tokenizer of a checkpoint. It encodes texts, renders conversations, and decodes tokens all at once or one by one."""

import json
import re
from codecs import utf_8_decode
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, RequestError, convert_library_errors, convert_memory_errors, shortened
from paceline.small_files import write_atomically
from paceline.tokenizer.backend import TokenizerBackend
from paceline.tokenizer.chat_template import ChatTemplate
from paceline.tokenizer.control_text import ControlTokenEscaper
from paceline.tokenizer.files import has_template_file, open_pretrained
from paceline.tokenizer.gguf import read_gguf_tokenizer

_MAX_WINDOW_TOKENS = 32
_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT_CHAR = "\N{REPLACEMENT CHARACTER}"
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A byte piece: it stands for one byte of a character that is not in the vocabulary."""


class Tokenizer:
    """The tokenizer of a checkpoint.

    Attributes:
        vocab_size: the largest id + 1. A model's weight matrices may have more rows.
        special_token_ids: ids of control tokens.
        end_token_ids: ids that end an answer; empty unless the tokenizer comes from a GGUF file.
        notices: messages to the user, one line each.
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
    @convert_memory_errors("the tokenizer")
    def open(cls, directory: Path) -> "Tokenizer":
        """Open the tokenizer of a checkpoint directory or a GGUF file; Python code in a checkpoint is never run.

        Raises:
            CheckpointError: there is no tokenizer, or it cannot be read.
            CapacityError: the tokenizer does not fit in memory.
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
            CheckpointError: the metadata are invalid, or the kind of tokenizer is unknown.
        """
        parts = read_gguf_tokenizer(metadata, source)
        return cls(parts, end_token_ids=parts.end_token_ids, notices=[parts.notice] if parts.notice else [])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text. The spelling of a special token in it is encoded as that token.

        Raises:
            RequestError: the tokenizer cannot encode the text.
        """
        if half := _SURROGATE.search(text):
            raise RequestError(f"the text contains {half[0]!r}, half of a surrogate pair and not a character: send text without it")
        with convert_library_errors("the model's tokenizer cannot encode this text; send another", RequestError):
            ids: list[int] = self._pretrained.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return ids

    @cached_property
    def max_piece_chars(self) -> int:
        """Number of characters of the longest piece. A text of N characters therefore has at least N / max_piece_chars tokens."""
        return max(map(len, self._backend.vocabulary))

    @cached_property
    def control_token_escaper(self) -> ControlTokenEscaper:
        """Finds spellings of control tokens in texts, and encodes them as ordinary text."""
        return ControlTokenEscaper(self._pretrained.backend_tokenizer, self._backend.vocabulary)

    def encode_as_text(self, text: str) -> list[int]:
        """Encode a text. The spelling of a control token in it is encoded as ordinary text. Errors as for `encode`."""
        escaped = self.control_token_escaper.escape([text], other_texts=[])
        if not escaped.contains_control_text:
            return self.encode(text, add_special_tokens=False)
        return self.control_token_escaper.encode(escaped, escaped.unescape_json(escaped.value[0]))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Ids outside the vocabulary are skipped.

        Of adjacent byte pieces such as <0xE4>, each byte that is not part of a valid character becomes a replacement character.

        Source: SentencePiece's decoder. The tokenizers library would replace all of them if one byte is invalid. This would change
            text that was already streamed.
        """
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        if _REPLACEMENT_CHAR in text and self.has_byte_pieces:
            hidden = self.special_token_ids if skip_special_tokens else ()
            pieces = [piece for token_id in ids if (piece := self.piece(token_id)) and token_id not in hidden]
            text = self._backend.decode_pieces(_replace_invalid_bytes(pieces))
        return text

    def piece(self, token_id: int) -> str:
        """Return a token's piece, which is its text in the vocabulary, such as "Ġthe" or "<0x0A>"; empty for unknown ids."""
        return self._backend.id_to_token(token_id) or ""

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a chat template, so that conversations can be rendered."""
        return bool(self._template_source())

    @property
    def has_byte_pieces(self) -> bool:
        """Whether a character that is not in the vocabulary is encoded as one piece per byte, such as <0xE4>."""
        return self._backend.has_byte_pieces

    def to_json(self) -> str:
        """Return the text of a tokenizer.json, including tokens that were added after loading.

        Raises:
            RequestError: the tokenizers library cannot write it.
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
        write_atomically(directory / "tokenizer.json", self.to_json())
        write_atomically(directory / "tokenizer_config.json", json.dumps(settings, indent=1) + "\n")

    def template_uses(self, name: str) -> bool:
        """Return whether the chat template's text contains a variable such as "tools" or "enable_thinking"."""
        template = self._chat_template(has_tools=name == "tools")
        return template is not None and template.mentions_variable(name)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> list[int]:
        """Render a conversation with the chat template and encode it; arguments and errors as for `render_chat`."""
        return self.encode(self.render_chat(messages, **arguments), add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        max_model_len: int | None = None,
    ) -> str:
        """Render a conversation with the chat template. The text includes the template's special tokens.

        Args:
            tools, options, max_model_len: as for `ChatTemplate.render`. With tools, the template "tool_use" is used if the model has it.

        Raises:
            RequestError: the tokenizer has no chat template, or the template rejects the messages, fails, or exceeds a limit.
            BackendUnavailableError: the process that renders templates cannot be started.
        """
        template = self._chat_template(has_tools=bool(tools))
        if template is None:
            text = "this model has no chat template, so it cannot take messages: use a model trained for conversations, or complete texts "
            raise RequestError(text + "(generate, /v1/completions, /api/generate)", parameter="messages")
        if not messages:
            raise RequestError("messages is empty; send at least one message", parameter="messages")
        return template.render(
            messages, tools=tools, options=options, add_generation_prompt=add_generation_prompt, max_model_len=max_model_len
        )

    def template_renders(self, texts: Sequence[str], messages: Sequence[Mapping[str, Any]], *, has_tools: bool = False) -> bool:
        """Return whether the rendered conversation contains all of `texts`. The result is cached by `texts`.

        Also True if this cannot be tested, because the template rejects the conversation even without the messages that contain `texts`.
        """
        template = self._chat_template(has_tools=has_tools)
        if template is None:
            return True
        key = (self.template_source(has_tools=has_tools), tuple(texts))
        if key not in self._rendered:
            self._rendered[key] = _renders_texts(template, texts, messages)
        return self._rendered[key]

    def check_chat_template(self) -> None:
        """Check that the chat template, if there is one, compiles.

        Raises:
            CheckpointError: it does not compile.
            BackendUnavailableError: the process that renders templates cannot be started.
        """
        try:
            template = self._chat_template()
        except RequestError as error:
            raise CheckpointError(str(error)) from error
        if template is not None:
            template.check_compiles()

    def template_source(self, *, has_tools: bool = False) -> str:
        """Return the source of the chat template; empty if there is none.

        Raises:
            RequestError: the value in the file is not a string.
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
        return (has_tools and source.get("tool_use")) or source.get("default", "")

    def added_token_id(self, text: str) -> int | None:
        """Return the id of the added token with exactly this text; None if there is none."""
        return self._backend.added_token_ids.get(text)

    def detokenizer(self, shown_token_ids: Collection[int] = ()) -> "IncrementalDetokenizer":
        """Return a detokenizer for one stream of tokens.

        Args:
            shown_token_ids: special tokens that become part of the text. Others are omitted.
        """
        return IncrementalDetokenizer(self, shown_token_ids)


def _renders_texts(template: ChatTemplate, texts: Sequence[str], messages: Sequence[Mapping[str, Any]]) -> bool:
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
    valid_pieces: list[str] = []
    pending_bytes = bytearray()
    for piece in (*pieces, ""):
        if _BYTE_PIECE.fullmatch(piece):
            pending_bytes.append(_byte_of_piece(piece))
            continue
        for character in pending_bytes.decode("utf-8", "surrogateescape"):  # "surrogateescape" decodes an invalid byte as a surrogate
            is_invalid = "\udc80" <= character <= "\udcff"
            valid_pieces += [_REPLACEMENT_CHAR] if is_invalid else [f"<0x{byte:02X}>" for byte in character.encode()]
        pending_bytes.clear()
        valid_pieces.append(piece)
    return valid_pieces[:-1]


def _num_incomplete_bytes(pieces: Sequence[str]) -> int:
    """Return how many bytes at the end, at most three, are the beginning of a character that the next pieces may complete."""
    last_bytes = bytearray()
    for piece in reversed(pieces[-3:]):
        if not _BYTE_PIECE.fullmatch(piece):
            break
        last_bytes.insert(0, _byte_of_piece(piece))
    _, num_decoded = utf_8_decode(last_bytes, "replace", False)  # False = do not decode an incomplete character at the end
    return len(last_bytes) - num_decoded


def _byte_of_piece(piece: str) -> int:
    return int(piece[3:5], 16)


def has_chat_template(path: Path) -> bool:
    """Return whether the files of a checkpoint contain a chat template, without opening the tokenizer.

    Raises:
        CheckpointError: a file is damaged.
    """
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        from paceline.models.gguf.file import open_gguf

        return any(name.startswith("tokenizer.chat_template") for name in open_gguf(path).metadata)
    return has_template_file(path)


class IncrementalDetokenizer:
    """Decodes a stream of tokens, one by one. The returned texts add up to the text that `Tokenizer.decode` returns for all tokens.

    Special tokens other than `shown_token_ids` are omitted.

    For speed, only a window of the last tokens is decoded. It begins one token before the first token whose text is
    yet to be returned: a tokenizer may drop a space at the beginning of a text.
    """

    __slots__ = ("_has_byte_pieces", "_hidden", "_num_returned", "_parts", "_read_from", "_tokenizer", "_window")

    def __init__(self, tokenizer: Tokenizer, shown_token_ids: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids - frozenset(shown_token_ids)
        self._has_byte_pieces = tokenizer.has_byte_pieces
        self._window: list[int] = []
        self._read_from = 0  # index in the window of the first token whose text was not yet returned
        self._num_returned = 0  # how many characters of the window's text were returned
        self._parts: list[str] = []

    def copy(self) -> "IncrementalDetokenizer":
        """Return a detokenizer that continues from the same token. Its `text` is empty."""
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
        """Add a token; return the text that it adds, which is empty while a character is incomplete."""
        piece = self._tokenizer.piece(token_id)
        if token_id in self._hidden or not piece:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        num_incomplete = self._num_incomplete_chars(text)
        new = text[self._num_returned : len(text) - num_incomplete]
        if not num_incomplete:
            self._start_window_at(self._read_from)
        else:
            self._num_returned += len(new)
            if len(self._window) > _MAX_WINDOW_TOKENS:
                self._shorten_window(text)
        self._parts.append(new)
        return new

    def flush(self) -> str:
        """Return the rest of the text, with replacement characters for an incomplete character. Call this after the last token."""
        new = self._decode(self._window)[self._num_returned :]
        self._window.clear()
        self._read_from = self._num_returned = 0
        self._parts.append(new)
        return new

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)  # `push` omits hidden special tokens

    def _num_incomplete_chars(self, text: str) -> int:
        """Return how many replacement characters at the end of `text` stand for a character that the next token may complete."""
        if self._has_byte_pieces:
            return _num_incomplete_bytes([self._tokenizer.piece(token_id) for token_id in self._window[-3:]])
        return int(text.endswith(_REPLACEMENT_CHAR))

    def _start_window_at(self, first: int) -> None:
        del self._window[:first]
        self._read_from = len(self._window)
        self._num_returned = len(self._decode(self._window))

    def _shorten_window(self, text: str) -> None:
        """Shorten the window during a long series of invalid bytes. An incomplete character is within the last four tokens."""
        num_pending = len(text) - self._num_returned
        del self._window[:-4]
        self._read_from = 0
        self._num_returned = max(len(self._decode(self._window)) - num_pending, 0)

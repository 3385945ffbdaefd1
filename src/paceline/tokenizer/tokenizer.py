"""Text to token ids and back, and text as it streams out of a model."""

import re
from codecs import utf_8_decode
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, RequestError, library_errors, memory_errors, shortened
from paceline.tokenizer.backend import TokenizerBackend
from paceline.tokenizer.chat_template import ChatTemplate
from paceline.tokenizer.control_text import ControlTexts
from paceline.tokenizer.files import open_pretrained
from paceline.tokenizer.gguf import GgufTokenizer, read_gguf_tokenizer

_MAX_WINDOW = 32
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""By which a vocabulary spells the characters it lacks."""


class Tokenizer:
    """The tokenizer of a checkpoint.

    `vocab_size` is the number of ids it knows, the largest id + 1; a model's matrices may have more rows. `end_token_ids` are the ids
    that end an answer where the tokenizer itself says so, which a GGUF file's does; `notices` are lines a user should see.
    """

    def __init__(self, pretrained: Any, *, end_token_ids: Sequence[int] = (), notices: Sequence[str] = ()) -> None:
        self._pretrained = pretrained
        self.end_token_ids = tuple(end_token_ids)
        self.notices = tuple(notices)
        self._backend = TokenizerBackend(pretrained.backend_tokenizer)
        self.vocab_size = max(self._backend.vocabulary.values()) + 1
        self.special_token_ids = self._backend.special_token_ids
        self._templates: dict[str, ChatTemplate] = {}
        self._shown: dict[tuple[str, tuple[str, ...]], bool] = {}

    @classmethod
    @memory_errors("the tokenizer")
    def open(cls, directory: Path) -> "Tokenizer":
        """The tokenizer in a checkpoint directory or a GGUF file; code that a checkpoint may bring along is never run.

        Raises:
            CheckpointError: there is none, or it cannot be read.
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
        """The tokenizer in the metadata of a GGUF file; `source` names the file in errors.

        Raises:
            CheckpointError: the metadata describe none we know.
        """
        parts = read_gguf_tokenizer(metadata, source)
        return cls(_FromGguf(parts), end_token_ids=parts.end_token_ids, notices=[parts.notice] if parts.notice else [])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it become their ids.

        Raises:
            RequestError: the tokenizer fails at it.
        """
        if half := _HALF_PAIR.search(text):
            raise RequestError(f"the text holds {half[0]!r}, half of a surrogate pair and no character: send text without it")
        with library_errors("the model's tokenizer cannot encode this text; send another", RequestError):
            ids: list[int] = self._pretrained.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return ids

    @cached_property
    def longest_piece(self) -> int:
        """Characters of the longest piece. A text has no fewer tokens than its characters divided by this."""
        return max(map(len, self._backend.vocabulary))

    @cached_property
    def control_texts(self) -> ControlTexts:
        """Finds control tokens in texts, and encodes texts in which these are no control tokens."""
        return ControlTexts(self._pretrained.backend_tokenizer, self._backend.vocabulary)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text`, in which control tokens that are written out stay text; errors as for `encode`."""
        escaped = self.control_texts.escaped([text], others=[])
        if not escaped.is_needed:
            return self.encode(text, add_special_tokens=False)
        return self.control_texts.encode(escaped, escaped.normalized(escaped.value[0]))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids the tokenizer does not know stand for nothing.

        Of a run of byte pieces (<0xE4>) every whole character is one; each byte that is part of none is a replacement character.

        Source: SentencePiece's decoder. Deviation from the tokenizers library, which makes the whole run replacement characters as soon
            as one byte is wrong: text that was streamed would have to be taken back.
        """
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        if _REPLACEMENT in text and self.has_byte_pieces:
            hidden = self.special_token_ids if skip_special_tokens else ()
            pieces = [piece for token_id in ids if (piece := self.piece(token_id)) and token_id not in hidden]
            text = self._backend.joined(_without_bad_bytes(pieces))
        return text

    def piece(self, token_id: int) -> str:
        """The vocabulary's own spelling of a token ("Ġthe", "<0x0A>"); empty for ids it does not know."""
        return self._backend.id_to_token(token_id) or ""

    @property
    def has_chat_template(self) -> bool:
        """Whether it can turn messages into token ids."""
        return bool(self._template_source())

    @property
    def has_byte_pieces(self) -> bool:
        """Whether characters outside the vocabulary are spelled as runs of pieces like <0xE4>, and decoded so."""
        return self._backend.has_byte_pieces

    def to_json(self) -> str:
        """The text of a tokenizer.json with every token that was added since.

        Raises:
            RequestError: it cannot be written.
        """
        return self._backend.to_json()

    def template_takes(self, name: str) -> bool:
        """Whether the chat template has a use for a variable such as "tools" or "enable_thinking", as far as its text shows."""
        template = self._chat_template(has_tools=name == "tools")
        return template is not None and template.mentions(name)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        max_model_len: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation as the model was trained to see it; arguments and errors as for `chat_text`."""
        text = self.chat_text(
            messages, tools=tools, options=options, add_generation_prompt=add_generation_prompt, max_model_len=max_model_len
        )
        return self.encode(text, add_special_tokens=False)

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
            max_model_len: largest number of tokens of a prompt; limits the length of the text (`chat_template.most_characters`).

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

    def template_shows(self, texts: Sequence[str], messages: Sequence[Mapping[str, Any]], *, has_tools: bool = False) -> bool:
        """Whether the chat template shows all texts of a conversation; it is rendered once for the same texts.

        Also true where it rejects the messages without these texts, so that nothing is known.
        """
        template = self._chat_template(has_tools=has_tools)
        if template is None:
            return True
        key = (self.template_source(has_tools=has_tools), tuple(texts))
        if key not in self._shown:
            self._shown[key] = _is_shown(template, texts, messages)
        return self._shown[key]

    def check_chat_template(self) -> None:
        """Check that the chat template, if there is one, compiles.

        Raises:
            CheckpointError: it does not.
            BackendUnavailableError: no process can be started to find out.
        """
        try:
            template = self._chat_template()
        except RequestError as error:
            raise CheckpointError(str(error)) from error
        if template is not None:
            template.check()

    def template_source(self, *, has_tools: bool = False) -> str:
        """The text of the chat template; empty where there is none.

        Raises:
            RequestError: it is no text.
        """
        source = self._template_source(has_tools=has_tools)
        if source and not isinstance(source, str):
            raise RequestError(f"the model's chat template is {shortened(source)}, not a text: send plain prompts", parameter="messages")
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
        """The id of the token that was added to the vocabulary to stand for exactly `text`; None where there is none."""
        return self._backend.added_token_ids.get(text)

    def detokenizer(self, shown_token_ids: Collection[int] = ()) -> "IncrementalDetokenizer":
        """A fresh one for one stream of tokens.

        Args:
            shown_token_ids: special tokens that are part of the text.
        """
        return IncrementalDetokenizer(self, shown_token_ids)


def _is_shown(template: ChatTemplate, texts: Sequence[str], messages: Sequence[Mapping[str, Any]]) -> bool:
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


def _without_bad_bytes(pieces: Sequence[str]) -> list[str]:
    """The same pieces with a replacement character for every byte that is part of no character."""
    mended: list[str] = []
    run = bytearray()
    for piece in (*pieces, ""):
        if _BYTE_PIECE.fullmatch(piece):
            run.append(_byte(piece))
            continue
        for character in run.decode("utf-8", "surrogateescape"):  # a bad byte becomes a surrogate
            is_bad = "\udc80" <= character <= "\udcff"
            mended += [_REPLACEMENT] if is_bad else [f"<0x{byte:02X}>" for byte in character.encode()]
        run.clear()
        mended.append(piece)
    return mended[:-1]


def _num_open_bytes(pieces: Sequence[str]) -> int:
    """Bytes at the end that may still become a character, three at most; only the last three pieces count."""
    run = bytearray()
    for piece in reversed(pieces[-3:]):
        if not _BYTE_PIECE.fullmatch(piece):
            break
        run.insert(0, _byte(piece))
    _, num_closed = utf_8_decode(run, "replace", False)  # more may follow
    return len(run) - num_closed


def _byte(piece: str) -> int:
    return int(piece[3:5], 16)


class _FromGguf:
    """What `Tokenizer` needs of a pretrained tokenizer."""

    def __init__(self, parts: GgufTokenizer) -> None:
        self.backend_tokenizer = parts.backend
        self.chat_template = parts.chat_templates
        self.special_tokens_map = parts.named_tokens

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]:
        # unlike `encode`, this releases the GIL
        ids: list[int] = self.backend_tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids


class IncrementalDetokenizer:
    """Text as tokens arrive: what was returned never changes, and all of it together is `Tokenizer.decode` of all ids but hidden ones.

    Hidden are special tokens other than `shown_token_ids`.

    Only a window of the last tokens is decoded. It begins at a token boundary that is also a character boundary, one token
    before the text not yet returned, because a tokenizer may drop the space in front of the first token it is given.
    """

    __slots__ = ("_has_byte_pieces", "_hidden", "_num_returned", "_parts", "_read_from", "_tokenizer", "_window")

    def __init__(self, tokenizer: Tokenizer, shown_token_ids: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids - frozenset(shown_token_ids)
        self._has_byte_pieces = tokenizer.has_byte_pieces
        self._window: list[int] = []
        self._read_from = 0  # index in the window of the first token whose text is not returned
        self._num_returned = 0  # characters of the window's text that are
        self._parts: list[str] = []

    def copy(self) -> "IncrementalDetokenizer":
        """Another one that goes on from here, without the text returned so far."""
        other = IncrementalDetokenizer(self._tokenizer)
        other._hidden = self._hidden
        other._window = list(self._window)
        other._read_from, other._num_returned = self._read_from, self._num_returned
        return other

    @property
    def text(self) -> str:
        """Everything returned so far."""
        return "".join(self._parts)

    def push(self, token_id: int) -> str:
        """The text that became final with this token; empty while a character is incomplete."""
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
            if len(self._window) > _MAX_WINDOW:
                self._shorten_window(text)
        self._parts.append(new)
        return new

    def flush(self) -> str:
        """The rest, with replacement characters for characters that were never completed."""
        new = self._decode(self._window)[self._num_returned :]
        self._window.clear()
        self._read_from = self._num_returned = 0
        self._parts.append(new)
        return new

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)  # hidden ones never come here

    def _num_open(self, text: str) -> int:
        """Characters at the end that may still turn into another one: each byte that waits for more, or the last character."""
        if self._has_byte_pieces:
            return _num_open_bytes([self._tokenizer.piece(token_id) for token_id in self._window[-3:]])
        return int(text.endswith(_REPLACEMENT))

    def _start_window_at(self, first: int) -> None:
        del self._window[:first]
        self._read_from = len(self._window)
        self._num_returned = len(self._decode(self._window))

    def _shorten_window(self, text: str) -> None:
        """Keep the window short within endless invalid bytes: four tokens hold all bytes of the one open character."""
        num_pending = len(text) - self._num_returned
        del self._window[:-4]
        self._read_from = 0
        self._num_returned = max(len(self._decode(self._window)) - num_pending, 0)

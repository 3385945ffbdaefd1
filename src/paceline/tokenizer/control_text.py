"""Encodes the spelling of a control token in a message, such as "<|im_end|>", as ordinary text, so that users cannot inject such tokens.

Before a chat template is rendered, one character of each such spelling is replaced by a placeholder. All control tokens in the rendered
text then come from the template. They are replaced by mark characters, and the placeholders by the original characters. This text is
encoded by a tokenizer whose only control tokens are the marks. Finally, the marks' ids are replaced by those of the control tokens.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from paceline.errors import RequestError, convert_library_errors

_PRIVATE_USE = range(0xE000, 0xF900)  # Unicode assigns no characters here; JSON escapes each as a single \uXXXX
_PRIVATE_USE_PATTERN = re.compile("[\ue000-\uf8ff]")
_MAX_PREFIX_CHARS = 64  # control tokens are searched for by this many first characters
_WINDOW_CHARS = 1 << 16  # characters per regular-expression call, which holds the GIL
_MAX_SPLIT_ROUNDS = 8  # splitting a spelling of one control token may leave a spelling of another


class ControlTokenEscaper:
    """Finds the spellings of a tokenizer's control tokens in texts, and encodes them as ordinary text.

    Args:
        library_tokenizer: the tokenizer of the tokenizers library.
        vocabulary: pieces of the tokenizer. Their characters are not used as placeholders.
    """

    def __init__(self, library_tokenizer: Backend, vocabulary: Iterable[str]) -> None:
        self._library_tokenizer = library_tokenizer
        added = library_tokenizer.get_added_tokens_decoder()
        self._control_tokens: dict[int, AddedToken] = {token_id: token for token_id, token in added.items() if token.special}
        self._ordinary_tokens = [token for token in added.values() if not token.special]
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        self._used_chars = set(_PRIVATE_USE_PATTERN.findall("".join(chain(vocabulary, self._added_ids))))
        texts = [token.content for token in self._control_tokens.values() if token.content.strip()]
        self._pattern = re.compile(f"(?=({_trie_pattern(text[:_MAX_PREFIX_CHARS] for text in texts)}))") if texts else None
        self._longest = max(map(len, texts), default=0)
        self._prefixes = {text[:end] for text in texts for end in range(1, len(text))}
        self._suffixes = {text[start:] for text in texts for start in range(1, len(text))}
        normalizer = library_tokenizer.normalizer
        is_normalized = normalizer is not None and any(token.normalized for token in self._control_tokens.values())
        self._normalize: Callable[[str], str] | None = normalizer.normalize_str if is_normalized else None

    def escape(self, value: Any, *, other_texts: Sequence[str], exempt_texts: Mapping[int, Sequence[str]] | None = None) -> "EscapedValue":
        """Return a copy of `value` in which a placeholder replaces one character of each spelling of a control token.

        Args:
            value: a list of JSON values. Keys of mappings are escaped as well.
            other_texts: texts, such as the template, whose characters are not used as placeholders.
            exempt_texts: spellings that are not escaped, by index in `value`.
        """
        placeholders = _Placeholders(self._used_chars, [value, *other_texts])
        if self._pattern is None:
            return EscapedValue(value, placeholders, contains_control_text=False)
        parts = [self._escaped_copy(one, placeholders, tuple((exempt_texts or {}).get(index, ()))) for index, one in enumerate(value)]
        return EscapedValue(parts, placeholders, contains_control_text=bool(placeholders.by_character) or self._has_lookalikes(value))

    def encode(self, escaped: "EscapedValue", text: str) -> list[int]:
        """Encode `text`, rendered from `escaped.value`. Only control tokens that the template wrote are encoded as control tokens.

        Raises:
            RequestError: the tokenizer cannot encode the text.
        """
        with convert_library_errors("the model's tokenizer cannot encode this text; send another", RequestError):
            encoding = self._library_tokenizer.encode_batch([text], add_special_tokens=False)[0]
            marks = escaped.placeholders.allocate_chars(2)
            parts: list[str] = []
            marked_ids: list[int | None] = []
            end = 0
            for index, token_id in enumerate(encoding.ids):  # `encoding.offsets` would hold the GIL for too long
                token = self._control_tokens.get(token_id)
                if token is None:
                    continue
                start, stop = encoding.token_to_chars(index) or (0, 0)
                if text[start:stop].strip() == token.content.strip():
                    parts += [escaped.restore(text[end:start]), marks[token.normalized]]
                    marked_ids.append(token_id)
                    end = stop
            return self._encode_replacing_marks([*parts, escaped.restore(text[end:])], marked_ids, marks)

    def _encode_replacing_marks(self, parts: list[str], marked_ids: list[int | None], marks: str) -> list[int]:
        """Encode texts that are separated by mark characters, and replace the marks' ids.

        Args:
            parts: texts and marks in order; a mark is an item of its own.
            marked_ids: the token id that replaces each mark; None = the mark is only a separator.
            marks: the mark characters.
        """
        tokenizer = self._without_control_tokens(marks)
        mark_ids = {tokenizer.token_to_id(mark) for mark in marks}
        original_ids = {tokenizer.token_to_id(token.content): self._added_ids[token.content] for token in self._ordinary_tokens}
        controls = self._control_tokens.keys() - original_ids.keys() - mark_ids - self._unknown_ids()
        for _ in range(_MAX_SPLIT_ROUNDS):
            encoding = tokenizer.encode_batch(["".join(parts)], add_special_tokens=False)[0]
            ids: list[int] = encoding.ids
            cuts = [encoding.token_to_chars(index) or (0, 0) for index, token_id in enumerate(ids) if token_id in controls]
            if not any(stop - start > 1 for start, stop in cuts):
                break
            parts, marked_ids = _insert_marks("".join(parts), marked_ids, [start + 1 for start, _ in cuts], marks)
        ids_without_marks: list[int] = []
        next_marked = iter(marked_ids)
        for token_id in ids:
            if token_id not in mark_ids:
                if token_id not in controls:
                    ids_without_marks.append(original_ids.get(token_id, token_id))
            elif (marked := next(next_marked)) is not None:
                ids_without_marks.append(marked)
        return ids_without_marks

    def _without_control_tokens(self, marks: str) -> Backend:
        """Return a tokenizer whose only control tokens are the marks. It shares memory with the original one."""
        tokenizer = Backend(self._library_tokenizer.model)
        if self._library_tokenizer.normalizer is not None:
            tokenizer.normalizer = self._library_tokenizer.normalizer
        if self._library_tokenizer.pre_tokenizer is not None:
            tokenizer.pre_tokenizer = self._library_tokenizer.pre_tokenizer
        tokenizer.add_tokens([*self._ordinary_tokens, *(AddedToken(mark, normalized=bool(index)) for index, mark in enumerate(marks))])
        return tokenizer

    def _unknown_ids(self) -> set[int | None]:
        """Return the ids (None = not set) that stand for unknown characters. They stay in encoded texts, even as control tokens."""
        model = self._library_tokenizer.model
        piece = getattr(model, "unk_token", None)
        return {getattr(model, "unk_id", None), None if piece is None else self._library_tokenizer.token_to_id(piece)}

    def _escaped_copy(self, value: Any, placeholders: "_Placeholders", exempt: Sequence[str]) -> Any:  # exempt: texts left as they are
        if isinstance(value, str):
            return self._escape_text(value, placeholders, exempt)
        if isinstance(value, Mapping):
            return {
                self._escaped_copy(key, placeholders, exempt): self._escaped_copy(one, placeholders, exempt) for key, one in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._escaped_copy(one, placeholders, exempt) for one in value]
        return value

    def _escape_text(self, text: str, placeholders: "_Placeholders", exempt: Sequence[str]) -> str:
        positions = sorted({*self._token_starts(text, exempt), *self._partial_token_indices(text)})
        if not positions:
            return text
        characters = list(text)
        for position in positions:
            characters[position] = placeholders.replace(characters[position])
        return "".join(characters)

    def _token_starts(self, text: str, exempt: Sequence[str]) -> Iterator[int]:
        """Yield the index of each spelling of a control token, after leading spaces, which templates may strip."""
        assert self._pattern is not None
        for window in range(0, len(text), _WINDOW_CHARS):
            for match in self._pattern.finditer(text, window, window + _WINDOW_CHARS + self._longest):
                if match.start() < window + _WINDOW_CHARS and match[1] not in exempt:
                    yield match.start() + len(match[1]) - len(match[1].lstrip())

    def _partial_token_indices(self, text: str) -> Iterator[int]:
        """Yield the index in `text` of each incomplete control token at its beginning or end. Adjacent text may complete it."""
        for length in range(1, min(self._longest, len(text) + 1)):
            if text[-length:] in self._prefixes and not text[-length].isspace():
                yield len(text) - length
            if text[:length] in self._suffixes and not text[0].isspace():
                yield 0

    def _has_lookalikes(self, value: Any) -> bool:
        """Return whether Unicode normalization turns a string in `value` into a control token, such as one in full-width letters."""
        if self._normalize is None or self._pattern is None:
            return False
        return any(self._pattern.search(self._normalize(text)) for text in strings_in(value) if not text.isascii())


@dataclass(frozen=True, slots=True)
class EscapedValue:
    """A copy of a value in which spellings of control tokens contain placeholders.

    Attributes:
        value: the copy.
        placeholders: the placeholders that were assigned.
        contains_control_text: whether `value` has such spellings. If so, encode the rendered text with `ControlTokenEscaper.encode`.
    """

    value: Any
    placeholders: "_Placeholders"
    contains_control_text: bool

    def unescape_json(self, text: str) -> str:
        """Replace placeholders that the template wrote as \\uXXXX, as in ASCII JSON or Python's repr, by the placeholder characters."""
        for placeholder in self.placeholders.by_character.values():
            text = re.sub(rf"\\u{ord(placeholder):04x}", placeholder, text, flags=re.IGNORECASE)
        return text

    def restore(self, text: str) -> str:
        """Replace placeholders by the original characters."""
        return text.translate({ord(placeholder): character for character, placeholder in self.placeholders.by_character.items()})


class _Placeholders:
    """Assigns a placeholder to each replaced character: a private-use character that is not in `used_chars` or the texts in `values`."""

    def __init__(self, used_chars: set[str], values: Sequence[Any]) -> None:
        self._used_chars, self._values = used_chars, values
        self._free: Iterator[str] | None = None
        self.by_character: dict[str, str] = {}

    def replace(self, character: str) -> str:
        """Return the placeholder for a character."""
        if character not in self.by_character:
            self.by_character[character] = self.allocate_chars(1)
        return self.by_character[character]

    def allocate_chars(self, count: int) -> str:
        """Return `count` unused private-use characters; raise a RequestError if there are too few."""
        if self._free is None:
            occurring = {one for text in strings_in(self._values) for one in _PRIVATE_USE_PATTERN.findall(text)}
            taken = self._used_chars | occurring
            self._free = iter([chr(code) for code in _PRIVATE_USE if chr(code) not in taken])
        characters = "".join(one for _, one in zip(range(count), self._free, strict=False))
        if len(characters) < count:
            raise RequestError("the messages use all private-use characters from U+E000 to U+F8FF: leave some out", parameter="messages")
        return characters


def strings_in(value: Any) -> Iterator[str]:
    """Yield every string in nested lists and mappings, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from strings_in(key)
            yield from strings_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from strings_in(one)


def _insert_marks(text: str, marked_ids: Sequence[int | None], positions: Sequence[int], marks: str) -> tuple[list[str], list[int | None]]:
    """Insert a separator mark at each of the positions; return the new parts and the token ids that replace the marks."""
    parts: list[str] = []
    ids: list[int | None] = []
    remaining_ids = iter(marked_ids)
    start = 0
    for position in (*positions, len(text)):
        piece = text[start:position]
        ids += [next(remaining_ids) for character in piece if character in marks]
        parts.append(piece)
        start = position
        if position < len(text):
            parts.append(marks[0])
            ids.append(None)
    return parts, ids


def _trie_pattern(texts: Iterable[str]) -> str:
    """Return a regular expression that matches the longest of `texts`. It has the form of a trie, so that matching takes linear time."""
    root: dict[str, Any] = {}
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _trie_node_pattern(root)


def _trie_node_pattern(node: dict[str, Any]) -> str:
    options = [re.escape(character) + _trie_node_pattern(child) for character, child in node.items() if character]
    if not options:
        return ""
    pattern = options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"
    return f"(?:{pattern})?" if "" in node else pattern

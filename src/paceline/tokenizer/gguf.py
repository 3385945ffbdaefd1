"""Builds the tokenizer that the metadata of a GGUF file describes, with the `tokenizers` library. It encodes texts as llama.cpp does.

There are three kinds of tokenizers. "gpt2" is byte-level BPE; the file contains the merges and the name of a rule that splits text into
words. "llama" is SentencePiece BPE; the file contains scores, from which the merges are derived. "gemma4" is SentencePiece BPE; the file
contains the merges.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from paceline.errors import CheckpointError, convert_library_errors, is_unicode, shortened
from paceline.tokenizer.backend import ConvertedTokenizer
from paceline.tokenizer.byte_level import DEFAULT_SPLIT, SPLIT_RULES, bos_eos_processor, byte_level_backend, derive_merges, merge_work_error

MAX_VOCAB_SIZE = 1 << 20
_OTHER_FILE_ADVICE = "use the model's safetensors directory, which contains tokenizer.json, or a newer conversion of it"
# Texts of tokens that end an answer, because some GGUF files do not list these tokens as EOS, EOT or EOM.
_END_TOKENS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>"})
_END_TOKENS |= {"<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>", "<turn|>"}
_TOOL_USE = "tool_use"
DUPLICATE_SUFFIX = "\U0010fffd"  # of several tokens with the same text, all but the last get this suffix, which decoding removes


class _TokenType(IntEnum):
    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_ADDED_TYPES = (_TokenType.UNKNOWN, _TokenType.CONTROL, _TokenType.USER_DEFINED)


def read_gguf_tokenizer(metadata: Mapping[str, Any], source: object) -> ConvertedTokenizer:
    """Build the tokenizer that the metadata of a GGUF file describes.

    Args:
        metadata: values by key.
        source: the file, for error texts.

    Raises:
        CheckpointError: a value is missing or invalid, or the kind of tokenizer is unknown.
    """
    fields = _MetadataFields(metadata, source)
    kind = fields.text("model")
    if kind not in _BUILDER_BY_MODEL:
        raise fields.error("model", kind, f"a kind that is not supported; supported are {', '.join(map(repr, _BUILDER_BY_MODEL))}")
    vocabulary = _Vocabulary.read(fields, is_sentencepiece=kind == "llama", allow_duplicates=kind == "gemma4")
    build = _BUILDER_BY_MODEL[kind]
    with convert_library_errors(f"{source}: its tokenizer cannot be built; {_OTHER_FILE_ADVICE}", CheckpointError):
        backend, add_bos, notice = build(fields, vocabulary)
        backend.add_tokens(_added_tokens(fields, vocabulary, is_sentencepiece=kind == "llama"))
        backend.post_processor = _bos_eos_processor(fields, vocabulary, add_bos=add_bos)
    return ConvertedTokenizer(backend, vocabulary.token_by_role(), _chat_templates(fields), vocabulary.end_token_ids(), notice)


@dataclass(frozen=True, slots=True)
class _MetadataFields:
    """Reads the metadata of a file and checks the types of values. Error texts contain the file, the key and the value.

    The methods take a key without its prefix: "tokenizer." for chat templates, "tokenizer.ggml." for other names without a dot.

    Attributes:
        values: the metadata by key.
        source: the file.
    """

    values: Mapping[str, Any]
    source: object

    @staticmethod
    def full_key(name: str) -> str:
        if name.startswith("chat_template"):
            return f"tokenizer.{name}"
        return name if "." in name else f"tokenizer.ggml.{name}"

    def error(self, name: str, value: object, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {self.full_key(name)} is {shortened(value)}, {problem}; {_OTHER_FILE_ADVICE}")

    def missing_error(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self.source} has no {self.full_key(name)}, so it contains no readable tokenizer; {_OTHER_FILE_ADVICE}")

    def get(self, name: str) -> Any:
        return self.values.get(self.full_key(name))

    def text(self, name: str, default: str | None = None) -> str:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise self.missing_error(name)
        if not isinstance(value, str) or not is_unicode(value):
            raise self.error(name, value, "not a text in UTF-8")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(name, value, "not true or false")
        return value

    def array(self, name: str) -> list[Any] | None:
        """Return the items of an array; None = the file does not have it."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.error(name, value, "not an array")
        return value

    def required_strings(self, name: str) -> list[str]:
        """Return an array that must exist and contain only strings in UTF-8."""
        items = self.array(name)
        if items is None:
            raise self.missing_error(name)
        try:
            "".join(items).encode("utf-8")
        except (TypeError, UnicodeEncodeError):
            index = next(index for index, item in enumerate(items) if not isinstance(item, str) or not is_unicode(item))
            raise self.error(f"{name}[{index}]", items[index], "not a text in UTF-8") from None
        return items

    def number_per_token(self, name: str, num_tokens: int, dtype_kinds: str) -> NDArray[Any] | None:
        """Return an array with a number for each token, of one of the NumPy `dtype_kinds`; None = the file does not have it."""
        items = self.array(name)
        if items is None:
            return None
        if len(items) != num_tokens:
            raise self.error(name, f"{len(items)} values", f"but there are {num_tokens} tokens")
        try:
            numbers = np.asarray(items)
        except ValueError:  # the items are lists of different lengths
            numbers = np.empty(0, dtype=object)
        if numbers.dtype.kind not in dtype_kinds or numbers.shape != (num_tokens,):
            raise self.error(name, items, "not an array of numbers of its kind")
        return numbers

    def token_id(self, name: str, num_tokens: int, default: int | None = None) -> int | None:
        value = self.get(name)
        if value is None:
            return default if default is not None and default < num_tokens else None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_tokens:
            raise self.error(name, value, f"not a token id from 0 to {num_tokens - 1}")
        return value


def _chat_templates(fields: _MetadataFields) -> dict[str, str]:
    """Return the default chat template, and those with a name, such as "tool_use"."""
    templates = {"default": fields.text("chat_template", "")}
    for name in fields.required_strings("chat_templates") if fields.get("chat_templates") is not None else ():
        templates[name] = fields.text(f"chat_template.{name}", "")
    templates.setdefault(_TOOL_USE, fields.text(f"chat_template.{_TOOL_USE}", ""))  # some files do not list it in `chat_templates`
    return {name: source for name, source in templates.items() if source}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The tokens of a file.

    Attributes:
        tokens, types: text and type of each id, without unused ids at the end.
        roles: token id by role: "bos", "eos", "eot", "eom", "unknown" or "padding".
        num_ids_in_file: number of ids in the file, unused ids included.
    """

    tokens: list[str]
    types: list[int]
    roles: dict[str, int]
    num_ids_in_file: int

    @classmethod
    def read(cls, fields: _MetadataFields, *, is_sentencepiece: bool, allow_duplicates: bool) -> "_Vocabulary":
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(fields.required_strings("tokens"))]
        if allow_duplicates:  # of several ids with the same text, encoding uses only the last one
            last = {token: index for index, token in enumerate(tokens)}
            tokens = [token if last[token] == index else f"{token}{DUPLICATE_SUFFIX}" for index, token in enumerate(tokens)]
        if not tokens:
            raise fields.error("tokens", [], "no token at all")
        if len(tokens) > MAX_VOCAB_SIZE:
            raise fields.error("tokens", tokens, f"{len(tokens)} tokens; at most {MAX_VOCAB_SIZE} are possible")
        types = cls._types(fields, len(tokens))
        defaults = {"bos": 1, "eos": 2, "unknown": 0} if is_sentencepiece else {}
        roles = {}
        for role in ("bos", "eos", "eot", "eom", "unknown", "padding"):
            token_id = fields.token_id(f"{role}_token_id", len(tokens), defaults.get(role))
            if token_id is not None:
                roles[role] = token_id
        # If weight matrices have more rows than the vocabulary, converters add unused tokens, which must never be generated.
        used = len(tokens)
        while used and types[used - 1] == _TokenType.UNUSED and used - 1 not in roles.values():
            used -= 1
        if len(set(tokens[:used])) != used:
            token, count = Counter(tokens[:used]).most_common(1)[0]
            raise fields.error(f"tokens[{tokens.index(token)}]", token, f"which {count} ids have")
        return cls(tokens[:used], types[:used], roles, len(tokens))

    @staticmethod
    def _types(fields: _MetadataFields, num_tokens: int) -> list[int]:
        types = fields.number_per_token("token_type", num_tokens, "iu")
        if types is None:
            return [int(_TokenType.NORMAL)] * num_tokens
        wrong = np.flatnonzero((types < _TokenType.UNDEFINED) | (types > _TokenType.BYTE))
        if wrong.size:
            raise fields.error(f"token_type[{wrong[0]}]", int(types[wrong[0]]), "not a type from 0 to 6")
        token_types: list[int] = types.tolist()
        return token_types

    def ids_by_piece(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens)}

    def token_by_role(self) -> dict[str, str]:
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        return {name: self.tokens[self.roles[role]] for name, role in names.items() if role in self.roles}

    def end_token_ids(self) -> tuple[int, ...]:
        ends = {self.roles[role] for role in ("eos", "eot", "eom") if role in self.roles}
        by_text = {token: index for index, token in enumerate(self.tokens) if token in _END_TOKENS and self.types[index] in _ADDED_TYPES}
        if {"<|return|>", "<|call|>"} <= set(by_text):
            by_text.pop("<|end|>", None)  # in gpt-oss, an answer consists of several messages, and each ends with <|end|>
        return tuple(sorted(ends | set(by_text.values())))


def _build_byte_level(fields: _MetadataFields, vocabulary: _Vocabulary) -> tuple[Backend, bool, str | None]:
    """Build byte-level BPE; return it, whether a BOS id is added to texts by default, and a message to the user."""
    name = fields.text("pre", "")
    split = SPLIT_RULES.get(name) if name else DEFAULT_SPLIT
    if split is None:
        raise fields.error("pre", name, "an unknown way to split text")
    notice = None
    if not name:
        notice = f"{fields.source} does not specify how its tokenizer splits text: an older conversion, so prompts may be tokenized wrongly"
    ids = vocabulary.ids_by_piece()
    backend = byte_level_backend(ids, _stored_merges(fields, ids), split)
    return backend, split.add_bos, notice


def _stored_merges(fields: _MetadataFields, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for index, merge in enumerate(fields.required_strings("merges")):
        left, _, right = merge.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise fields.error(f"merges[{index}]", merge, "not two tokens whose concatenation is a token")
        merges.append((left, right))
    return merges


def _build_gemma4(fields: _MetadataFields, vocabulary: _Vocabulary) -> tuple[Backend, bool, str | None]:
    """Build SentencePiece BPE with stored merges. Text is split at runs of newlines before it is encoded."""
    ids, unknown = vocabulary.ids_by_piece(), vocabulary.token_by_role().get("unk_token")
    merges = _stored_merges(fields, ids)
    backend = Backend(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True, ignore_merges=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    steps = [decoders.Replace(DUPLICATE_SUFFIX, ""), decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    return backend, True, None


def _build_sentencepiece(fields: _MetadataFields, vocabulary: _Vocabulary) -> tuple[Backend, bool, str | None]:
    """Build SentencePiece BPE, whose merges are derived from scores."""
    merges = _merges_by_score(fields, vocabulary)
    unknown = vocabulary.token_by_role().get("unk_token")
    backend = Backend(models.BPE(vocabulary.ids_by_piece(), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = fields.flag("add_space_prefix", default=True)
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend, True, None


_BUILDER_BY_MODEL = {"gpt2": _build_byte_level, "llama": _build_sentencepiece, "gemma4": _build_gemma4}


def _merges_by_score(fields: _MetadataFields, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return the merges in order of the score of the merged token."""
    stored = fields.number_per_token("scores", vocabulary.num_ids_in_file, "fiu")
    if stored is None:
        raise fields.missing_error("scores")
    wrong = np.flatnonzero(~np.isfinite(stored))
    if wrong.size:
        raise fields.error(f"scores[{wrong[0]}]", float(stored[wrong[0]]), "not a finite number")
    scores = stored.tolist()
    types = vocabulary.types
    mergeable = (_TokenType.UNDEFINED, _TokenType.NORMAL, _TokenType.UNUSED)
    pieces = {token: index for index, token in enumerate(vocabulary.tokens) if types[index] in mergeable}
    problem = merge_work_error(pieces)
    if problem is not None:
        raise fields.error(f"tokens[{pieces[problem[0]]}]", *problem)
    return derive_merges({piece: (-scores[index], index) for piece, index in pieces.items()})


def _added_tokens(fields: _MetadataFields, vocabulary: _Vocabulary, *, is_sentencepiece: bool) -> list[AddedToken]:
    """Return the tokens, such as control tokens, that are recognised in a text before it is split into words."""
    name = fields.text("general.name", "").lower()
    # Phi-3 was trained without whitespace after most special tokens. GGUF files do not contain this setting.
    is_phi3 = is_sentencepiece and (fields.text("general.architecture", "") == "phi3" or "phi-3" in name or "phi3" in name)
    ends = {vocabulary.roles[role] for role in ("bos", "eos", "eot", "eom") if role in vocabulary.roles}
    added = []
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind in _ADDED_TYPES or index in ends:
            special = kind != _TokenType.USER_DEFINED or index in ends
            rstrip = is_phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")
            added.append(AddedToken(token, special=special, normalized=False, rstrip=rstrip))
    return added


def _bos_eos_processor(fields: _MetadataFields, vocabulary: _Vocabulary, *, add_bos: bool) -> processors.TemplateProcessing:
    """Return a post-processor that adds a BOS id before a text and an EOS id after it, if the file requires them."""
    bos, eos = vocabulary.roles.get("bos"), vocabulary.roles.get("eos")
    before = bos if fields.flag("add_bos_token", default=add_bos) else None
    after = eos if fields.flag("add_eos_token", default=False) else None
    added = [None if token is None else (vocabulary.tokens[token], token) for token in (before, after)]
    return bos_eos_processor(*added)

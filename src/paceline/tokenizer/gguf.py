"""The tokenizer a GGUF file describes in its metadata, built from the parts of the `tokenizers` library.

Three models of text occur in files of language models: byte-level BPE ("gpt2": merges are stored, the splitting of text into words goes
by a name), SentencePiece BPE ("llama": scores are stored, merges follow from them) and the latter with its merges stored ("gemma4"). Ids
are those llama.cpp gives.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from paceline.errors import CheckpointError, library_errors
from paceline.tokenizer.gguf_fields import WAY_OUT, TokenizerFields
from paceline.tokenizer.gguf_splits import DEFAULT_SPLIT, SPLITS

MAX_TOKENS = 1 << 20
_MAX_MERGED_CHARACTERS = 1024
_MAX_MERGING_WORK = 1 << 28  # squares of all pieces' lengths: what looking for their parts takes
# names of tokens that end answers; conversions do not always mark them as such
_END_TEXTS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>"})
_END_TEXTS |= {"<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>", "<turn|>"}
_TOOL_USE = "tool_use"
_TWICE = "\U0010fffd"  # tells ids of one text apart, and is not decoded


class _TokenType(IntEnum):
    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_ADDED = (_TokenType.UNKNOWN, _TokenType.CONTROL, _TokenType.USER_DEFINED)


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """Holds the tokenizer of a GGUF file.

    Attributes:
        backend: encodes and decodes; adds the BOS and EOS ids that the file requires.
        named_tokens: texts of `bos_token`, `eos_token`, `unk_token` and `pad_token`, by name; those that the file has.
        end_token_ids: ids that end an answer, ascending.
        chat_templates: Jinja sources by name; "default" is `tokenizer.chat_template`. Empty if the file has none.
        notice: one line to show to the user; None = there is none.
    """

    backend: Backend
    named_tokens: Mapping[str, str]
    end_token_ids: tuple[int, ...]
    chat_templates: Mapping[str, str]
    notice: str | None


def read_gguf_tokenizer(metadata: Mapping[str, Any], source: object) -> GgufTokenizer:
    """The tokenizer in the metadata of a GGUF file.

    Args:
        metadata: values by key; arrays as lists or numpy arrays.
        source: the file, named in errors.

    Raises:
        CheckpointError: a value is absent, of the wrong type or out of range, or the kind of tokenizer is not one we know.
    """
    fields = TokenizerFields(metadata, source)
    kind = fields.text("model")
    if kind not in _BUILDERS:
        raise fields.error("model", kind, f"a kind this version cannot build (it knows {', '.join(map(repr, _BUILDERS))})")
    vocabulary = _Vocabulary.read(fields, is_sentencepiece=kind == "llama", may_repeat=kind == "gemma4")
    build = _BUILDERS[kind]
    with library_errors(f"{source}: its tokenizer cannot be built; {WAY_OUT}", CheckpointError):
        backend, add_bos, notice = build(fields, vocabulary)
        backend.add_tokens(_added_tokens(fields, vocabulary, is_sentencepiece=kind == "llama"))
        backend.post_processor = _frame(fields, vocabulary, add_bos=add_bos)
    return GgufTokenizer(backend, vocabulary.named_tokens(), vocabulary.end_token_ids(), _chat_templates(fields), notice)


def _chat_templates(fields: TokenizerFields) -> dict[str, str]:
    """The default template, and those that `tokenizer.chat_templates` names, such as "tool_use" for conversations with tools."""
    found = {"default": fields.text("chat_template", "")}
    for name in fields.required_strings("chat_templates") if fields.get("chat_templates") is not None else ():
        found[name] = fields.text(f"chat_template.{name}", "")
    found.setdefault(_TOOL_USE, fields.text(f"chat_template.{_TOOL_USE}", ""))  # some files do not list it
    return {name: source for name, source in found.items() if source}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens by id with their types, and the ids that have a role; `num_stored` counts the unused ids at the end as well."""

    tokens: list[str]
    types: list[int]
    roles: dict[str, int]
    num_stored: int

    @classmethod
    def read(cls, fields: TokenizerFields, *, is_sentencepiece: bool, may_repeat: bool) -> "_Vocabulary":
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(fields.required_strings("tokens"))]
        if may_repeat:  # a text is encoded as the last of its ids
            last = {token: index for index, token in enumerate(tokens)}
            tokens = [token if last[token] == index else f"{token}{_TWICE}" for index, token in enumerate(tokens)]
        if not tokens:
            raise fields.error("tokens", [], "no token at all")
        if len(tokens) > MAX_TOKENS:
            raise fields.error("tokens", tokens, f"{len(tokens)} tokens; at most {MAX_TOKENS} are possible")
        types = cls._types(fields, len(tokens))
        defaults = {"bos": 1, "eos": 2, "unknown": 0} if is_sentencepiece else {}
        roles = {}
        for role in ("bos", "eos", "eot", "eom", "unknown", "padding"):
            token_id = fields.token_id(f"{role}_token_id", len(tokens), defaults.get(role))
            if token_id is not None:
                roles[role] = token_id
        # Matrices are wider than vocabularies, and converters invent tokens for the rest: they must never be drawn.
        used = len(tokens)
        while used and types[used - 1] == _TokenType.UNUSED and used - 1 not in roles.values():
            used -= 1
        if len(set(tokens[:used])) != used:
            token, count = Counter(tokens[:used]).most_common(1)[0]
            raise fields.error(f"tokens[{tokens.index(token)}]", token, f"which {count} ids have")
        return cls(tokens[:used], types[:used], roles, len(tokens))

    @staticmethod
    def _types(fields: TokenizerFields, num_tokens: int) -> list[int]:
        types = fields.one_per_token("token_type", num_tokens, "iu")
        if types is None:
            return [int(_TokenType.NORMAL)] * num_tokens
        wrong = np.flatnonzero((types < _TokenType.UNDEFINED) | (types > _TokenType.BYTE))
        if wrong.size:
            raise fields.error(f"token_type[{wrong[0]}]", int(types[wrong[0]]), "not a type from 0 to 6")
        kinds: list[int] = types.tolist()
        return kinds

    def ids(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens)}

    def named_tokens(self) -> dict[str, str]:
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        return {name: self.tokens[self.roles[role]] for name, role in names.items() if role in self.roles}

    def end_token_ids(self) -> tuple[int, ...]:
        ends = {self.roles[role] for role in ("eos", "eot", "eom") if role in self.roles}
        by_text = {token: index for index, token in enumerate(self.tokens) if token in _END_TEXTS and self.types[index] in _ADDED}
        if {"<|return|>", "<|call|>"} <= set(by_text):
            by_text.pop("<|end|>", None)  # there it ends one of several messages of an answer
        return tuple(sorted(ends | set(by_text.values())))


def _byte_level(fields: TokenizerFields, vocabulary: _Vocabulary) -> tuple[Backend, bool, str | None]:
    """Byte-level BPE; whether a BOS id is put in front unless the file says so; a notice."""
    name = fields.text("pre", "")
    split = SPLITS.get(name) if name else DEFAULT_SPLIT
    if split is None:
        raise fields.error("pre", name, "a way to split text that this version does not know")
    notice = None
    if not name:
        notice = f"{fields.source} does not say how its tokenizer splits text: an older conversion, whose prompts may be split wrongly"
    ids = vocabulary.ids()
    backend = Backend(models.BPE(ids, _stored_merges(fields, ids), ignore_merges=split.ignore_merges))
    if split.is_nfc:
        backend.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend, split.add_bos, notice


def _stored_merges(fields: TokenizerFields, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for index, merge in enumerate(fields.required_strings("merges")):
        left, _, right = merge.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise fields.error(f"merges[{index}]", merge, "not two tokens whose concatenation is a token")
        merges.append((left, right))
    return merges


def _sentencepiece_lines(fields: TokenizerFields, vocabulary: _Vocabulary) -> tuple[Backend, bool, str | None]:
    """SentencePiece BPE with stored merges, of each line and each run of line ends by itself; a token is one whatever its merges."""
    ids, unknown = vocabulary.ids(), vocabulary.named_tokens().get("unk_token")
    merges = _stored_merges(fields, ids)
    backend = Backend(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True, ignore_merges=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    steps = [decoders.Replace(_TWICE, ""), decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    return backend, True, None


def _sentencepiece(fields: TokenizerFields, vocabulary: _Vocabulary) -> tuple[Backend, bool, str | None]:
    """SentencePiece BPE; a BOS id is put in front unless the file says otherwise."""
    merges = _merges_by_score(fields, vocabulary)
    unknown = vocabulary.named_tokens().get("unk_token")
    backend = Backend(models.BPE(vocabulary.ids(), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = fields.flag("add_space_prefix", default=True)
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend, True, None


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _sentencepiece_lines}


def _merges_by_score(fields: TokenizerFields, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, the best score first.

    Where two ways to the same token overlap in a text, the left one counts. They can only overlap where the token repeats itself:
    `left + right` before `right + rest` needs a token of period `len(left)`, so such ways come first, the shortest period first.
    """
    stored = fields.one_per_token("scores", vocabulary.num_stored, "fiu")
    if stored is None:
        raise fields.missing("scores")
    wrong = np.flatnonzero(~np.isfinite(stored))
    if wrong.size:
        raise fields.error(f"scores[{wrong[0]}]", float(stored[wrong[0]]), "not a finite number")
    scores = stored.tolist()
    types = vocabulary.types
    mergeable = (_TokenType.UNDEFINED, _TokenType.NORMAL, _TokenType.UNUSED)
    pieces = {token: index for index, token in enumerate(vocabulary.tokens) if types[index] in mergeable}
    work = 0
    for piece, index in pieces.items():
        if len(piece) > _MAX_MERGED_CHARACTERS:
            raise fields.error(f"tokens[{index}]", piece, f"longer than {_MAX_MERGED_CHARACTERS} characters")
        work += len(piece) ** 2
    if work > _MAX_MERGING_WORK:
        raise fields.error("tokens", list(pieces), "too many long ones: finding what they are put together from would take minutes")
    found: list[tuple[float, int, bool, int, str, str]] = []
    for piece, index in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                found.append((-scores[index], index, not piece.startswith(right), cut, left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _added_tokens(fields: TokenizerFields, vocabulary: _Vocabulary, *, is_sentencepiece: bool) -> list[AddedToken]:
    """Tokens that are found in a text before anything else is done with it."""
    name = fields.text("general.name", "").lower()
    # The file does not say it, but these models were trained so: whitespace behind most of their special tokens vanishes.
    is_phi3 = is_sentencepiece and (fields.text("general.architecture", "") == "phi3" or "phi-3" in name or "phi3" in name)
    ends = {vocabulary.roles[role] for role in ("bos", "eos", "eot", "eom") if role in vocabulary.roles}
    added = []
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind in _ADDED or index in ends:
            special = kind != _TokenType.USER_DEFINED or index in ends
            rstrip = is_phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")
            added.append(AddedToken(token, special=special, normalized=False, rstrip=rstrip))
    return added


def _frame(fields: TokenizerFields, vocabulary: _Vocabulary, *, add_bos: bool) -> processors.TemplateProcessing:
    """The ids in front of and behind a text."""
    bos, eos = vocabulary.roles.get("bos"), vocabulary.roles.get("eos")
    before = bos if fields.flag("add_bos_token", default=add_bos) else None
    behind = eos if fields.flag("add_eos_token", default=False) else None
    pieces = [*(["bos"] if before is not None else []), "$A", *(["eos"] if behind is not None else [])]
    named = {"bos": before, "eos": behind}
    special = [{"id": name, "ids": [token], "tokens": [vocabulary.tokens[token]]} for name, token in named.items() if token is not None]
    return processors.TemplateProcessing(single=pieces, special_tokens=special)

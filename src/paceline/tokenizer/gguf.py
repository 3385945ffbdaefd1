"""Builds the tokenizer that the metadata of a GGUF file describes, with the `tokenizers` library. It encodes texts as llama.cpp does.

There are three kinds of tokenizers. "gpt2" is byte-level BPE; the file contains the merges and the name of a rule that splits text into
words. "llama" is SentencePiece BPE; the file contains scores, from which the merges are derived. "gemma4" is SentencePiece BPE; the file
contains the merges.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from paceline.errors import CheckpointError, convert_library_errors, is_unicode, shortened

MAX_TOKENS = 1 << 20
_MAX_MERGED_CHARACTERS = 1024
_MAX_MERGE_WORK = 1 << 28  # limit for the sum of squared piece lengths, to which the time to derive merges is proportional
_WAY_OUT = "use the model's safetensors directory, which holds tokenizer.json, or a newer conversion of it"
# Texts of tokens that end an answer, because some GGUF files do not list these tokens as EOS, EOT or EOM.
_END_TEXTS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>"})
_END_TEXTS |= {"<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>", "<turn|>"}
_TOOL_USE = "tool_use"
_DUPLICATE = "\U0010fffd"  # of several tokens with the same text, all but the last get this suffix, which decoding removes


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
    """The tokenizer of a GGUF file.

    Attributes:
        backend: the tokenizer, which also adds the BOS and EOS ids if the file requires them.
        named_tokens: texts of `bos_token`, `eos_token`, `unk_token` and `pad_token`, as far as the file has them.
        end_token_ids: ids that end an answer, in ascending order.
        chat_templates: Jinja sources by name; "default" is `tokenizer.chat_template`. Empty if the file has none.
        notice: message to the user; None = no message.
    """

    backend: Backend
    named_tokens: Mapping[str, str]
    end_token_ids: tuple[int, ...]
    chat_templates: Mapping[str, str]
    notice: str | None


def read_gguf_tokenizer(metadata: Mapping[str, Any], source: object) -> GgufTokenizer:
    """Build the tokenizer that the metadata of a GGUF file describes.

    Args:
        metadata: values by key. Arrays are lists or numpy arrays.
        source: the file, for error texts.

    Raises:
        CheckpointError: a value is missing or invalid, or the kind of tokenizer is unknown.
    """
    fields = _MetadataFields(metadata, source)
    kind = fields.text("model")
    if kind not in _BUILDERS:
        raise fields.error("model", kind, f"a kind this version cannot build (it knows {', '.join(map(repr, _BUILDERS))})")
    vocabulary = _Vocabulary.read(fields, is_sentencepiece=kind == "llama", may_repeat=kind == "gemma4")
    build = _BUILDERS[kind]
    with convert_library_errors(f"{source}: its tokenizer cannot be built; {_WAY_OUT}", CheckpointError):
        backend, add_bos, notice = build(fields, vocabulary)
        backend.add_tokens(_added_tokens(fields, vocabulary, is_sentencepiece=kind == "llama"))
        backend.post_processor = _bos_eos_processor(fields, vocabulary, add_bos=add_bos)
    return GgufTokenizer(backend, vocabulary.named_tokens(), vocabulary.end_token_ids(), _chat_templates(fields), notice)


@dataclass(frozen=True, slots=True)
class _MetadataFields:
    """Reads the metadata of a file and checks the types of values. Error texts contain the file, the key and the value.

    The methods take a key without its prefix: "tokenizer." for chat templates, "tokenizer.ggml." for other names without a dot.

    Attributes:
        values: the metadata by key. Arrays are lists or numpy arrays.
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
        return CheckpointError(f"{self.source}: {self.full_key(name)} is {shortened(value)}, {problem}; {_WAY_OUT}")

    def missing_error(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self.source} has no {self.full_key(name)}, so it holds no tokenizer we can read; {_WAY_OUT}")

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
        """Return the items of an array as Python values; None = the file does not have it."""
        value = self.get(name)
        if value is None:
            return None
        value = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise self.error(name, value, "not an array")
        return list(value)

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

    def number_per_token(self, name: str, num_tokens: int, kinds: str) -> NDArray[Any] | None:
        """Return an array with a number for each token; None = the file does not have it. `kinds` are the allowed numpy dtype kinds."""
        items = self.array(name)
        if items is None:
            return None
        if len(items) != num_tokens:
            raise self.error(name, f"{len(items)} values", f"but there are {num_tokens} tokens")
        try:
            numbers = np.asarray(items)
        except ValueError:  # the items are lists of different lengths
            numbers = np.empty(0, dtype=object)
        if numbers.dtype.kind not in kinds or numbers.shape != (num_tokens,):
            raise self.error(name, items, "not an array of numbers of its kind")
        return numbers

    def token_id(self, name: str, num_tokens: int, default: int | None = None) -> int | None:
        value = self.get(name)
        if value is None:
            return default if default is not None and default < num_tokens else None
        value = value.item() if hasattr(value, "item") else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_tokens:
            raise self.error(name, value, f"not a token id from 0 to {num_tokens - 1}")
        return value


def _chat_templates(fields: _MetadataFields) -> dict[str, str]:
    """Return the default chat template, and those with a name, such as "tool_use"."""
    found = {"default": fields.text("chat_template", "")}
    for name in fields.required_strings("chat_templates") if fields.get("chat_templates") is not None else ():
        found[name] = fields.text(f"chat_template.{name}", "")
    found.setdefault(_TOOL_USE, fields.text(f"chat_template.{_TOOL_USE}", ""))  # some files do not list it in `tokenizer.chat_templates`
    return {name: source for name, source in found.items() if source}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The tokens of a file.

    Attributes:
        tokens, types: text and type of each id, without unused ids at the end.
        roles: token id by role, such as "eos".
        num_ids_in_file: number of ids in the file, unused ids included.
    """

    tokens: list[str]
    types: list[int]
    roles: dict[str, int]
    num_ids_in_file: int

    @classmethod
    def read(cls, fields: _MetadataFields, *, is_sentencepiece: bool, may_repeat: bool) -> "_Vocabulary":
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(fields.required_strings("tokens"))]
        if may_repeat:  # of several ids with the same text, encoding uses only the last one
            last = {token: index for index, token in enumerate(tokens)}
            tokens = [token if last[token] == index else f"{token}{_DUPLICATE}" for index, token in enumerate(tokens)]
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
            by_text.pop("<|end|>", None)  # in gpt-oss, an answer consists of several messages, and each ends with <|end|>
        return tuple(sorted(ends | set(by_text.values())))


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How byte-level BPE splits text into words before merging.

    Attributes:
        patterns: regular expressions (Oniguruma). Each splits the parts from the previous one into its matches and the text between them.
        ignore_merges: whether a word that is in the vocabulary becomes one token without applying merges.
        add_bos: whether a BOS id is added before a text, unless the file specifies it.
        is_nfc: whether text is first normalised to Unicode NFC.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    is_nfc: bool = False


_SUFFIXES = "'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = _SUFFIXES + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_ANY_CASE = f"(?i:{_SUFFIXES})" + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_LLAMA3 = _ANY_CASE + r"\p{N}{1,3}" + _OTHERS
_QWEN2 = _ANY_CASE + r"\p{N}" + _OTHERS
_QWEN35 = f"(?i:{_SUFFIXES})" + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
# _LOWER: any number of upper-case letters, then at least one lower-case letter. _UPPER: at least one upper-case letter, then lower-case.
_LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_TEKKEN = rf"{_LOWER}|{_UPPER}|\p{{N}}{_SLASHES}"
_O200K = rf"{_LOWER}(?i:{_SUFFIXES})?|{_UPPER}(?i:{_SUFFIXES})?|\p{{N}}{{1,3}}{_SLASHES}"
_DEEPSEEK3 = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|""" + _SPACES
_HAN_AND_KANA = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
_HAN_AND_MORE = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_THREE_DIGITS = "[0-9][0-9][0-9]"
# Letters with case, as the tokenizer of DeepSeek LLM lists them: those of Unicode 11 except mathematical and a few other blocks.
_CASED = r"""A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}
\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}
\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}
\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}
\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}
\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}
\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}
\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}
\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}
\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}""".replace("\n", "")
_PUNCTUATION = r"!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}"
# Kimi's rule is that of GPT-4o, but runs of Chinese characters are words of their own.
_KIMI = r"\p{Han}+|" + _O200K.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace("[\\r\\n/]*", "[\\r\\n]*")

DEFAULT_SPLIT = SplitRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _THREE_DIGITS))
"""The rule for files without `tokenizer.ggml.pre`."""

_SPLITS_BY_NAMES = {
    "default": DEFAULT_SPLIT,
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": SplitRule((_LLAMA3,), ignore_merges=True, add_bos=True),
    "dbrx smaug-bpe glm4 chatglm-bpe": SplitRule((_LLAMA3,)),
    "qwen2": SplitRule((_QWEN2,), is_nfc=True),
    "stablelm2 deepseek-r1-qwen hunyuan solar-open megrez grok-2 kormo": SplitRule((_QWEN2,)),
    "qwen35": SplitRule((_QWEN35,), is_nfc=True),
    "gpt-2 mpt olmo jais phi-2 trillion granite-docling exaone4 a.x-4.0 mellum gigachat": SplitRule((_GPT2,)),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": SplitRule((r"\p{N}", _GPT2)),
    "tekken": SplitRule((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 minimax-m2 kanana2": SplitRule((_O200K,)),
    "deepseek-v3 hunyuan-dense joyai-llm": SplitRule((r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK3)),
    "deepseek-llm": SplitRule((r"[\r\n]", rf"\s?[{_CASED}]+", rf"\s?[{_PUNCTUATION}]+", r"\s+$", _HAN_AND_MORE, r"\p{N}+")),
    "deepseek-coder": SplitRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_MORE, r"\p{N}")),
    "kimi-k2": SplitRule((_KIMI,)),
    "seed-coder": SplitRule((_ANY_CASE + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES,)),
    "minicpm5": SplitRule((r"\p{N}{1,3}", _ANY_CASE + r"\p{N}+" + _OTHERS), ignore_merges=True),
    "tiny_aya cohere2moe": SplitRule((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K)),
    "falcon": SplitRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _THREE_DIGITS)),
}

SPLITS = {name: split for names, split in _SPLITS_BY_NAMES.items() for name in names.split()}
"""Rule by the name in `tokenizer.ggml.pre`."""


def _build_byte_level(fields: _MetadataFields, vocabulary: _Vocabulary) -> tuple[Backend, bool, str | None]:
    """Build byte-level BPE; return it, whether a BOS id is added to texts by default, and a message to the user."""
    name = fields.text("pre", "")
    split = SPLITS.get(name) if name else DEFAULT_SPLIT
    if split is None:
        raise fields.error("pre", name, "an unknown way to split text")
    notice = None
    if not name:
        notice = f"{fields.source} does not specify how its tokenizer splits text: an older conversion, so prompts may be tokenized wrongly"
    ids = vocabulary.ids()
    backend = Backend(models.BPE(ids, _stored_merges(fields, ids), ignore_merges=split.ignore_merges))
    if split.is_nfc:
        backend.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
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
    ids, unknown = vocabulary.ids(), vocabulary.named_tokens().get("unk_token")
    merges = _stored_merges(fields, ids)
    backend = Backend(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True, ignore_merges=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    steps = [decoders.Replace(_DUPLICATE, ""), decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    return backend, True, None


def _build_sentencepiece(fields: _MetadataFields, vocabulary: _Vocabulary) -> tuple[Backend, bool, str | None]:
    """Build SentencePiece BPE, whose merges are derived from scores."""
    merges = _merges_by_score(fields, vocabulary)
    unknown = vocabulary.named_tokens().get("unk_token")
    backend = Backend(models.BPE(vocabulary.ids(), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = fields.flag("add_space_prefix", default=True)
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend, True, None


_BUILDERS = {"gpt2": _build_byte_level, "llama": _build_sentencepiece, "gemma4": _build_gemma4}


def _merges_by_score(fields: _MetadataFields, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return the merges: all pairs of tokens whose concatenation is a token, in order of the score of that token.

    If several pairs give the same token, those whose merged text can overlap itself come first: if `right` is a prefix of the token, as in
    "a" + "aa", the left one of two overlapping occurrences must be merged. Of these pairs, the shortest `left` comes first.
    """
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
    work = 0
    for piece, index in pieces.items():
        if len(piece) > _MAX_MERGED_CHARACTERS:
            raise fields.error(f"tokens[{index}]", piece, f"longer than {_MAX_MERGED_CHARACTERS} characters")
        work += len(piece) ** 2
    if work > _MAX_MERGE_WORK:
        raise fields.error("tokens", list(pieces), "too many long ones: deriving their merges would take minutes")
    found: list[tuple[float, int, bool, int, str, str]] = []
    for piece, index in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                found.append((-scores[index], index, not piece.startswith(right), cut, left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _added_tokens(fields: _MetadataFields, vocabulary: _Vocabulary, *, is_sentencepiece: bool) -> list[AddedToken]:
    """Return the tokens that are recognised in a text before it is split into words, such as control tokens."""
    name = fields.text("general.name", "").lower()
    # Phi-3 was trained without whitespace after most special tokens. GGUF files do not contain this setting.
    is_phi3 = is_sentencepiece and (fields.text("general.architecture", "") == "phi3" or "phi-3" in name or "phi3" in name)
    ends = {vocabulary.roles[role] for role in ("bos", "eos", "eot", "eom") if role in vocabulary.roles}
    added = []
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind in _ADDED or index in ends:
            special = kind != _TokenType.USER_DEFINED or index in ends
            rstrip = is_phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")
            added.append(AddedToken(token, special=special, normalized=False, rstrip=rstrip))
    return added


def _bos_eos_processor(fields: _MetadataFields, vocabulary: _Vocabulary, *, add_bos: bool) -> processors.TemplateProcessing:
    """Return a post-processor that adds a BOS id before a text and an EOS id after it, if the file requires them."""
    bos, eos = vocabulary.roles.get("bos"), vocabulary.roles.get("eos")
    before = bos if fields.flag("add_bos_token", default=add_bos) else None
    after = eos if fields.flag("add_eos_token", default=False) else None
    pieces = [*(["bos"] if before is not None else []), "$A", *(["eos"] if after is not None else [])]
    named = {"bos": before, "eos": after}
    special = [{"id": name, "ids": [token], "tokens": [vocabulary.tokens[token]]} for name, token in named.items() if token is not None]
    return processors.TemplateProcessing(single=pieces, special_tokens=special)

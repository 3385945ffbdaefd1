"""Builds byte-level BPE tokenizers: rules that split text into words (pre-tokenization), and the order of merges."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

_MAX_MERGED_PIECE_CHARS = 1024  # a vocabulary with a longer piece is refused
_MAX_MERGE_WORK = 1 << 28  # maximum sum of squared piece lengths: `derive_merges` takes time proportional to it


def _byte_characters() -> dict[int, str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}


BYTE_CHARACTERS = _byte_characters()
"""The character that stands for a byte in pieces, as in GPT-2: the byte's own if it is printable, else one from code 256 on."""


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How byte-level BPE splits text into words before merging: the pre-tokenizer.

    Attributes:
        patterns: regular expressions (Oniguruma). Each splits the parts that the previous one made into its matches and the text between.
        ignore_merges: whether a word that is in the vocabulary becomes one token without applying merges.
        add_bos: whether a BOS id is added before a text if the file does not specify whether to.
        is_nfc: whether text is first normalised to Unicode NFC.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    is_nfc: bool = False


_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2_PATTERN = _CONTRACTIONS + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS_AND_WORDS = f"(?i:{_CONTRACTIONS})" + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SYMBOLS_AND_WHITESPACE = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_LLAMA3_PATTERN = _CONTRACTIONS_AND_WORDS + r"\p{N}{1,3}" + _SYMBOLS_AND_WHITESPACE
_QWEN2_PATTERN = _CONTRACTIONS_AND_WORDS + r"\p{N}" + _SYMBOLS_AND_WHITESPACE
_QWEN35_PATTERN = f"(?i:{_CONTRACTIONS})" + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
# Upper-case letters, then lower-case ones. _LOWER_CASE_WORD has at least one lower-case letter, _UPPER_CASE_WORD at least one upper-case.
_LOWER_CASE_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER_CASE_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_SYMBOLS_SLASHES_AND_WHITESPACE = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_TEKKEN_PATTERN = rf"{_LOWER_CASE_WORD}|{_UPPER_CASE_WORD}|\p{{N}}{_SYMBOLS_SLASHES_AND_WHITESPACE}"
_O200K_PATTERN = rf"{_LOWER_CASE_WORD}(?i:{_CONTRACTIONS})?|{_UPPER_CASE_WORD}(?i:{_CONTRACTIONS})?"
_O200K_PATTERN += rf"|\p{{N}}{{1,3}}{_SYMBOLS_SLASHES_AND_WHITESPACE}"
_DEEPSEEK3_PATTERN = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
_DEEPSEEK3_PATTERN += r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
_HAN_AND_KANA = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
_HAN_KANA_AND_HANGUL = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_THREE_DIGITS = "[0-9][0-9][0-9]"
# Letters with case, as the tokenizer of DeepSeek LLM lists them: those of Unicode 11 except mathematical and a few other blocks.
_CASED_LETTERS = r"""A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}\x{370}-\x{373}
\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}
\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}
\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}
\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}
\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}
\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}
\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}
\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}
\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}""".replace("\n", "")
_PUNCTUATION = r"!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}"
# Kimi splits like GPT-4o, but adjacent Chinese characters are a word of their own.
_KIMI_PATTERN = r"\p{Han}+|" + _O200K_PATTERN.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace("[\\r\\n/]*", "[\\r\\n]*")

DEFAULT_SPLIT = SplitRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_PATTERN, r"\p{N}+", _THREE_DIGITS))
"""The rule for files without `tokenizer.ggml.pre`."""

_SPLIT_RULES_BY_NAMES = {  # a key contains all names of a rule, separated by spaces
    "default": DEFAULT_SPLIT,
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": SplitRule((_LLAMA3_PATTERN,), ignore_merges=True, add_bos=True),
    "dbrx smaug-bpe glm4 chatglm-bpe": SplitRule((_LLAMA3_PATTERN,)),
    "qwen2": SplitRule((_QWEN2_PATTERN,), is_nfc=True),
    "stablelm2 deepseek-r1-qwen hunyuan solar-open megrez grok-2 kormo": SplitRule((_QWEN2_PATTERN,)),
    "qwen35": SplitRule((_QWEN35_PATTERN,), is_nfc=True),
    "gpt-2 mpt olmo jais phi-2 trillion granite-docling exaone4 a.x-4.0 mellum gigachat": SplitRule((_GPT2_PATTERN,)),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": SplitRule((r"\p{N}", _GPT2_PATTERN)),
    "tekken": SplitRule((_TEKKEN_PATTERN,), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 minimax-m2 kanana2": SplitRule((_O200K_PATTERN,)),
    "deepseek-v3 hunyuan-dense joyai-llm": SplitRule((r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK3_PATTERN)),
    "deepseek-llm": SplitRule((r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", rf"\s?[{_PUNCTUATION}]+", r"\s+$", _HAN_KANA_AND_HANGUL, r"\p{N}+")),
    "deepseek-coder": SplitRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_KANA_AND_HANGUL, r"\p{N}")),
    "kimi-k2": SplitRule((_KIMI_PATTERN,)),
    "seed-coder": SplitRule((_CONTRACTIONS_AND_WORDS + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES,)),
    "minicpm5": SplitRule((r"\p{N}{1,3}", _CONTRACTIONS_AND_WORDS + r"\p{N}+" + _SYMBOLS_AND_WHITESPACE), ignore_merges=True),
    "tiny_aya cohere2moe": SplitRule((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K_PATTERN)),
    "falcon": SplitRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_PATTERN, _THREE_DIGITS)),
}

SPLIT_RULES = {name: split for names, split in _SPLIT_RULES_BY_NAMES.items() for name in names.split()}
"""Rule by the name in `tokenizer.ggml.pre`."""


def byte_level_backend(ids: Mapping[str, int], merges: Iterable[tuple[str, str]], split: SplitRule) -> Backend:
    """Build byte-level BPE from the ids by piece and the pairs of pieces to merge, highest priority first."""
    backend = Backend(models.BPE(dict(ids), list(merges), ignore_merges=split.ignore_merges))
    if split.is_nfc:
        backend.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def bos_eos_processor(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> processors.TemplateProcessing:
    """Return a post-processor that adds tokens, each a piece and its id, before and after a text; None = add none."""
    pieces = [*(["bos"] if bos else []), "$A", *(["eos"] if eos else [])]
    added = {name: token for name, token in (("bos", bos), ("eos", eos)) if token is not None}
    special = [{"id": name, "ids": [token_id], "tokens": [piece]} for name, (piece, token_id) in added.items()]
    return processors.TemplateProcessing(single=pieces, special_tokens=special)


def derive_merges(ranks: Mapping[str, tuple[float, int]]) -> list[tuple[str, str]]:
    """Return the merges of a vocabulary that has ranks: all pairs of tokens whose concatenation is a token, in order of its rank.

    If several pairs (left, right) give the same token, those whose `right` is a prefix of the token, such as ("a", "aa"), come first, and
    of these the shortest `left`: of two overlapping occurrences of the token in a text, the left one must be merged.
    """
    ranked_merges: list[tuple[tuple[float, int], bool, int, str, str]] = []  # rank of the token, two tie-breakers, left, right
    for piece, rank in ranks.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ranks and right in ranks:
                ranked_merges.append((rank, not piece.startswith(right), cut, left, right))
    ranked_merges.sort()
    return [(left, right) for *_, left, right in ranked_merges]


def merge_work_error(pieces: Iterable[str]) -> tuple[str, str] | None:
    """Return a piece and a reason if `derive_merges` would take minutes because of long pieces, else None."""
    work = 0
    for piece in pieces:
        if len(piece) > _MAX_MERGED_PIECE_CHARS:
            return piece, f"longer than {_MAX_MERGED_PIECE_CHARS} characters"
        work += len(piece) ** 2
        if work > _MAX_MERGE_WORK:
            return piece, "one of too many long ones: deriving their merges would take minutes"
    return None

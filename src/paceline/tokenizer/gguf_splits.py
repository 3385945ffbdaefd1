r"""How a byte-level BPE tokenizer splits text into words before it merges, by the name a GGUF file gives (`tokenizer.ggml.pre`).

Patterns are applied one after the other, each to the pieces the one before has left; text between two matches is a piece as well.
"""

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Split:
    """One way to split.

    Attributes:
        patterns: regular expressions (Oniguruma), in order.
        ignore_merges: whether a word that is a token is that token, whatever its merges would make of it.
        add_bos: whether a BOS id is put in front of a text where the file does not say.
        is_nfc: whether text is brought into the composed form first.
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
# words of lower-case letters after any upper-case ones, then words that may end in upper case
_LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_TEKKEN = rf"{_LOWER}|{_UPPER}|\p{{N}}{_SLASHES}"
_O200K = rf"{_LOWER}(?i:{_SUFFIXES})?|{_UPPER}(?i:{_SUFFIXES})?|\p{{N}}{{1,3}}{_SLASHES}"
_DEEPSEEK3 = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|""" + _SPACES
_HAN_AND_KANA = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
_HAN_AND_MORE = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_THREE_DIGITS = "[0-9][0-9][0-9]"

DEFAULT_SPLIT = Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _THREE_DIGITS))
"""Where a file gives no name."""

_BY_NAMES = {
    "default": DEFAULT_SPLIT,
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": Split((_LLAMA3,), ignore_merges=True, add_bos=True),
    "dbrx smaug-bpe glm4 chatglm-bpe": Split((_LLAMA3,)),
    "qwen2": Split((_QWEN2,), is_nfc=True),
    "stablelm2 deepseek-r1-qwen hunyuan solar-open megrez grok-2": Split((_QWEN2,)),
    "qwen35": Split((_QWEN35,), is_nfc=True),
    "gpt-2 mpt olmo jais phi-2 trillion granite-docling": Split((_GPT2,)),
    "starcoder refact command-r smollm codeshell exaone": Split((r"\p{N}", _GPT2)),
    "tekken": Split((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 minimax-m2": Split((_O200K,)),
    "deepseek-v3 hunyuan-dense joyai-llm": Split((r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK3)),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_MORE, r"\p{N}")),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _THREE_DIGITS)),
}

SPLITS = MappingProxyType({name: split for names, split in _BY_NAMES.items() for name in names.split()})
"""Every way to split, by name."""

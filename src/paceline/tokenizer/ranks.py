"""Builds tokenizers from rank files: Mistral's tekken.json and tiktoken files.

Such a file contains the bytes of each token and the token's rank. Of all adjacent tokens of a word, those whose concatenation has the
lowest rank are merged first. tekken.json also contains the expression that splits text into words, and the control tokens. A tiktoken
file contains neither: they are taken from the model's family.
"""

import base64
import binascii
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders

from paceline.errors import CheckpointError, convert_library_errors, is_unicode, shortened
from paceline.model_directory import list_directory
from paceline.small_files import TOKENIZER_BYTES, is_file, json_object, read_json, read_small
from paceline.tokenizer.backend import ConvertedTokenizer, check_token_ids
from paceline.tokenizer.byte_level import (
    BYTE_CHARACTERS,
    SPLIT_RULES,
    SplitRule,
    bos_eos_processor,
    byte_level_backend,
    derive_merges,
    merge_work_error,
)
from paceline.tokenizer.gguf import DUPLICATE_SUFFIX, MAX_VOCAB_SIZE

_META_FOLDER = "original"  # folder in Meta's checkpoints that contains tokenizer.model
_TIKTOKEN_FILES = ("tiktoken.model", "qwen.tiktoken", "tokenizer.model", f"{_META_FOLDER}/tokenizer.model")
_POSSESSIVE = re.compile(r"\{\d+(?:,\d*)?\}\+")  # tiktoken treats {n}+ as possessive, the tokenizers library as a repetition of {n}
_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
_FIX_HINT = "download it again, or save a tokenizer.json with the model's own library"
_TEKKEN_TOKEN_BY_ROLE = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_OLD_TEKKEN_TOKENS = (  # for tekken.json files that do not list them
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)  # fmt: skip
_LLAMA3_TOKENS = (  # of Llama 3.1; Llama 3.0 had reserved tokens instead of three of them
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>",
    *(f"<|reserved_special_token_{number}|>" for number in range(3, 248)),
)  # fmt: skip
_QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205)))


@dataclass(frozen=True, slots=True)
class _TiktokenFamily:
    """Properties of a tokenizer that its tiktoken file does not contain.

    Attributes:
        split_rule_name: key in `SPLIT_RULES`.
        control_tokens: texts of the ids after the largest rank, if tokenizer_config.json does not list them.
        num_control_ids: number of ids after the largest rank. Those without a text are named <|reserved_token_ID|>.
        token_by_role: texts of tokens by role such as "bos_token", unless tokenizer_config.json has them.
    """

    split_rule_name: str
    control_tokens: tuple[str, ...] = ()
    num_control_ids: int = 0
    token_by_role: Mapping[str, str] = field(default_factory=dict)


_QWEN_FAMILY = _TiktokenFamily("qwen2", _QWEN_TOKENS, token_by_role={"eos_token": _QWEN_TOKENS[0], "pad_token": _QWEN_TOKENS[0]})
_FAMILY_BY_MODEL_TYPE = {
    "llama": _TiktokenFamily("llama-bpe", _LLAMA3_TOKENS, token_by_role={"bos_token": _LLAMA3_TOKENS[0], "eos_token": _LLAMA3_TOKENS[1]}),
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), _TiktokenFamily("kimi-k2", num_control_ids=256)),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), _QWEN_FAMILY),
}
"""Keys are values of `model_type` in config.json."""


@dataclass(frozen=True, slots=True)
class _RankTable:
    """The content of a rank file.

    Attributes:
        ranks: id by bytes of a token; lower ids are merged first.
        control_tokens: (id, whether decoding omits the token) by text of a control token.
        token_by_role: texts of tokens by role, such as "bos_token".
    """

    ranks: Mapping[bytes, int]
    control_tokens: Mapping[str, tuple[int, bool]]
    token_by_role: Mapping[str, str]
    split_rule: SplitRule


def find_rank_file(directory: Path) -> Path | None:
    """Return the rank file in a checkpoint's directory; None if there is none, or a tokenizer.json, which is used instead."""
    if is_file(directory / "tokenizer.json"):
        return None
    tekken = [name for name in list_directory(directory) if "tekken" in name and name.endswith(".json")]
    if tekken:
        return directory / min(tekken, key=len)
    for path in (directory / name for name in _TIKTOKEN_FILES):
        if is_file(path) and not (path.name == "tokenizer.model" and is_sentencepiece_model(path)):
            return path
    return None


def is_sentencepiece_model(path: Path) -> bool:
    """Return whether a file is a SentencePiece model; tiktoken files may have the same name."""
    return (read_small(path, TOKENIZER_BYTES) or b"").startswith(b"\n")  # protobuf tag of field 1, `pieces`


def read_rank_file(path: Path, settings: Mapping[str, Any], chat_templates: Mapping[str, str]) -> ConvertedTokenizer:
    """Build a tokenizer from a rank file.

    Args:
        settings: content of tokenizer_config.json.
        chat_templates: Jinja sources by name.

    Raises:
        CheckpointError: the file is damaged, or it is not known how its model splits text into words.
    """
    content = read_small(path, TOKENIZER_BYTES) or b""
    table = _read_tekken(content, path) if path.suffix == ".json" else _read_tiktoken(content, path, settings)
    pieces = _checked_pieces(table, path)
    control = {text: token_id for text, (token_id, _) in table.control_tokens.items()}
    token_by_role = {**table.token_by_role, **_tokens_by_role(settings)}
    ids = {**pieces, **control}
    with convert_library_errors(f"{path}: its tokenizer cannot be built; {_FIX_HINT}", CheckpointError):
        backend = byte_level_backend(ids, derive_merges({piece: (0.0, rank) for piece, rank in pieces.items()}), table.split_rule)
        if any(DUPLICATE_SUFFIX in piece for piece in pieces):
            backend.decoder = decoders.Sequence([decoders.Replace(DUPLICATE_SUFFIX, ""), backend.decoder])
        backend.add_tokens([AddedToken(text, special=special, normalized=False) for text, (_, special) in table.control_tokens.items()])
        bos, eos = (token_by_role.get(role) if settings.get(f"add_{role}") is True else None for role in ("bos_token", "eos_token"))
        if settings.get("add_bos_token") is None and table.split_rule.add_bos:
            bos = token_by_role.get("bos_token")
        backend.post_processor = bos_eos_processor(*((text, ids[text]) if text in ids else None for text in (bos, eos)))
    return ConvertedTokenizer(backend, token_by_role, chat_templates)


def _checked_pieces(table: _RankTable, path: Path) -> dict[str, int]:
    """Return the ids of ordinary tokens by piece. A token spelled like a control token gets `DUPLICATE_SUFFIX`."""
    if not table.ranks.keys() >= {bytes([byte]) for byte in range(256)}:
        raise CheckpointError(f"{path} does not contain all 256 bytes, so it cannot encode every text; {_FIX_HINT}")
    ids = [*table.ranks.values(), *(token_id for token_id, _ in table.control_tokens.values())]
    if len(set(ids)) != len(ids):
        token_id = Counter(ids).most_common(1)[0][0]
        raise CheckpointError(f"{path} has two tokens of the id {token_id}, expected one; {_FIX_HINT}")
    check_token_ids(ids)
    spelled = {"".join(map(BYTE_CHARACTERS.__getitem__, token)): rank for token, rank in table.ranks.items()}
    problem = merge_work_error(spelled)
    if problem is not None:
        raise CheckpointError(f"{path} has the token {shortened(problem[0])}, {problem[1]}; {_FIX_HINT}")
    return {piece + DUPLICATE_SUFFIX if piece in table.control_tokens else piece: rank for piece, rank in spelled.items()}


def _tokens_by_role(settings: Mapping[str, Any]) -> dict[str, str]:
    values = {role: settings.get(role) for role in _TOKEN_ROLES}
    texts = {role: value.get("content") if isinstance(value, dict) else value for role, value in values.items()}
    return {role: text for role, text in texts.items() if isinstance(text, str)}


def _read_tekken(content: bytes, path: Path) -> _RankTable:
    """Read tekken.json. Control tokens have the lowest ids; the id of any other token is the number of control ids + its rank.

    Source: mistral-common, `Tekkenizer.from_file`.
    """
    values = json_object(content, path)
    config = values.get("config")
    if not isinstance(config, dict) or not isinstance(config.get("pattern"), str):
        raise CheckpointError(f"{path} has no config.pattern, so it is not a tekken.json; {_FIX_HINT}")
    possessive = _POSSESSIVE.search(config["pattern"])
    if possessive is not None:
        raise CheckpointError(f"{path}: config.pattern contains {shortened(possessive[0])}, which is not supported; {_FIX_HINT}")
    vocabulary, listed = values.get("vocab"), values.get("special_tokens")
    listed = [{"rank": rank, "token_str": text} for rank, text in enumerate(_OLD_TEKKEN_TOKENS)] if listed is None else listed
    if not isinstance(vocabulary, list) or not isinstance(listed, list):
        raise CheckpointError(f"{path} has no lists vocab and special_tokens; {_FIX_HINT}")
    num_control = _checked_count(config, "default_num_special_tokens", path)
    num_ranks = _checked_count(config, "default_vocab_size", path) - num_control
    if not 0 <= num_ranks <= len(vocabulary):
        raise CheckpointError(f"{path} has {len(vocabulary)} tokens in vocab, expected the {num_ranks} of default_vocab_size; {_FIX_HINT}")
    control = {f"<SPECIAL_{token_id}>": (token_id, True) for token_id in range(len(listed), num_control)}
    for item in listed:
        text, token_id = _token_text(item, "token_str", path), _checked_rank(item, path, num_control)
        if control.setdefault(text, (token_id, True))[0] != token_id:
            raise CheckpointError(f"{path} has the control token {shortened(text)} with two ids, expected one; {_FIX_HINT}")
    ranks: dict[bytes, int] = {}
    for index, item in enumerate(vocabulary[:num_ranks]):
        if _checked_rank(item, path, num_ranks) != index:
            raise CheckpointError(f"{path}: vocab[{index}] has the rank {item['rank']}, expected {index}; {_FIX_HINT}")
        _add_token(ranks, _decoded_base64(_token_text(item, "token_bytes", path), path), num_control + index, path)
    return _RankTable(ranks, control, _TEKKEN_TOKEN_BY_ROLE, SplitRule((config["pattern"],), ignore_merges=True, add_bos=True))


def _read_tiktoken(content: bytes, path: Path, settings: Mapping[str, Any]) -> _RankTable:
    family = _tiktoken_family(path)
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line:  # tiktoken skips empty lines
            continue
        token, _, rank = line.decode("latin-1").partition(" ")
        if not rank.isdecimal() or len(rank) > 9:
            raise CheckpointError(f"{path}: line {number} is {shortened(line)}, expected a token in base64 and its rank; {_FIX_HINT}")
        _add_token(ranks, _decoded_base64(token, path), int(rank), path)
    first = max(ranks.values(), default=-1) + 1
    control = {f"<|reserved_token_{token_id}|>": (token_id, True) for token_id in range(first, first + family.num_control_ids)}
    control |= {text: (first + index, True) for index, text in enumerate(family.control_tokens)}
    listed = settings.get("added_tokens_decoder")
    if isinstance(listed, dict):
        added = {int(token_id): (_token_text(item, "content", path), item.get("special") is not False) for token_id, item in listed.items()}
        texts = {text for text, _ in added.values()}
        control = {text: value for text, value in control.items() if value[0] not in added and text not in texts}
        control |= {text: (token_id, special) for token_id, (text, special) in added.items()}
    return _RankTable(ranks, control, family.token_by_role, replace(SPLIT_RULES[family.split_rule_name], ignore_merges=True))


def _tiktoken_family(path: Path) -> _TiktokenFamily:
    folder = path.parent.parent if path.parent.name == _META_FOLDER else path.parent
    config = read_json(folder / "config.json") or {}
    text_config = config.get("text_config")
    kind = text_config.get("model_type") if isinstance(text_config, dict) else config.get("model_type")
    family = _FAMILY_BY_MODEL_TYPE.get(kind) if isinstance(kind, str) else None
    if family is None:
        supported = ", ".join(sorted(_FAMILY_BY_MODEL_TYPE))
        raise CheckpointError(
            f"{path} is a tiktoken file, which does not contain how texts are split into words; this is known for the model types "
            f"{supported}, not for {shortened(kind)}: save a tokenizer.json with the model's own library"
        )
    return family


def _checked_count(config: Mapping[str, Any], name: str, path: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_VOCAB_SIZE:
        raise CheckpointError(f"{path}: config.{name} is {shortened(value)}, expected a number up to {MAX_VOCAB_SIZE}; {_FIX_HINT}")
    return value


def _checked_rank(item: object, path: Path, limit: int) -> int:
    rank = item.get("rank") if isinstance(item, dict) else None
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < limit:
        raise CheckpointError(f"{path} has a token of rank {shortened(rank)}, expected a number below {limit}; {_FIX_HINT}")
    return rank


def _add_token(ranks: dict[bytes, int], token: bytes, token_id: int, path: Path) -> None:
    if ranks.setdefault(token, token_id) != token_id:
        raise CheckpointError(f"{path} has the token {shortened(token)} twice, with the ids {ranks[token]} and {token_id}; {_FIX_HINT}")


def _token_text(token: object, field: str, path: Path) -> str:
    text = token.get(field) if isinstance(token, dict) else None
    if not isinstance(text, str) or not text or not is_unicode(text):
        raise CheckpointError(f"{path} has a token whose {field} is {shortened(text)}, expected a text; {_FIX_HINT}")
    return text


def _decoded_base64(text: str, path: Path) -> bytes:
    try:
        token = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        token = b""
    if not token:
        raise CheckpointError(f"{path} has the token {shortened(text)}, expected bytes in base64; {_FIX_HINT}")
    return token

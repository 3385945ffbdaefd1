"""Prompts to train with: read from files, or written by the target itself.

Files are JSON lines or JSON lists of records (messages, prompt, question, instruction, turns, text), or plain texts, which are cut into
pieces. Without files the target continues its own template's user header, and what it writes until its end token is a user turn.

Source: Magpie (Xu et al. 2024, arXiv:2406.08464). Deviation: turns are drawn at temperature 1 with top-p 0.95, and kept if they end.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.engine.loader import LoadedEngine
from paceline.errors import ConfigError, RequestError
from paceline.sampling.params import SamplingParams
from paceline.training.recorder import run
from paceline.training.settings import TrainSettings

SELF_MADE = "self"
"""Source of prompts that the target wrote."""
_MARK = "paceline-user-turn"
_PROMPT_KEYS = ("prompt", "question", "instruction", "query")
_ANSWER_KEYS = ("response", "answer", "output", "completion")
_PIECE_TOKENS = 64  # tokens of a text's beginning, which the target continues
_CHARACTERS = 4  # per token, roughly
PrintLine = Callable[[str], None]  # shows a line of progress to the user
_ROUND = 256  # user turns written in one call
_ROUNDS_BETWEEN_LINES = 4  # rounds between two lines of progress
_MAX_ROUNDS = 4  # times the number of rounds that would do if every turn were usable
_MAX_TURN_TOKENS, _LEAST_TURN_TOKENS = 96, 4


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, or a whole text with its answers marked.

    Attributes:
        token_ids: tokens of the prompt, or of the text.
        source: name of its file.
        answer_mask: whether each token is of an answer; None = the target is to answer.
    """

    token_ids: list[int]
    source: str
    answer_mask: list[bool] | None = None


def read_prompts(files: Sequence[str], loaded: LoadedEngine, settings: TrainSettings, *, most: int) -> list[Prompt]:
    """Read the prompts of files, equally many of each as long as they last, in an order that the seed decides.

    Args:
        most: number of prompts in all.

    Raises:
        ConfigError: a file cannot be read or holds nothing usable.
    """
    streams = [_prompts_of(Path(name), number, loaded, settings) for number, name in enumerate(files)]
    found: list[Prompt] = []
    while streams and len(found) < most:
        for stream in list(streams):
            one = next(stream, None)
            if one is None:
                streams.remove(stream)
            else:
                found.append(one)
    return found[:most]


def _prompts_of(path: Path, number: int, loaded: LoadedEngine, settings: TrainSettings) -> Iterator[Prompt]:
    """Yield the prompts of a file in the order of the seed."""
    records = [piece for record in read_records(path) for piece in _pieces(record, settings.max_tokens)]
    random.Random(f"{settings.seed}/{number}").shuffle(records)
    count = 0
    for record in records:
        one = _as_prompt(record, path.stem, loaded, settings)
        if one is not None:
            count += 1
            yield one
    if not count:
        raise ConfigError(
            f"{path} holds no usable prompt: records need messages, {', '.join(_PROMPT_KEYS)}, turns or text, of at most "
            f"{settings.max_prompt_tokens} tokens (--max-prompt-tokens)"
        )


def _pieces(record: Mapping[str, Any], max_tokens: int) -> list[Mapping[str, Any]]:
    """Return a record, or the pieces of a long text that are records of their own."""
    text, size = record.get("text"), _CHARACTERS * max_tokens
    if not isinstance(text, str) or len(text) <= size or _messages_of(record) is not None:
        return [record]
    return [{"text": text[start : start + size]} for start in range(0, len(text), size)]


def read_records(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the records of a JSON or JSON lines file; a plain text is one record.

    Raises:
        ConfigError: the file cannot be read, or is not what its name says.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): give a text, JSON or JSON lines file") from error
    kind = path.suffix.lower()
    if kind not in (".json", ".jsonl", ".ndjson"):
        yield {"text": text}
        return
    try:
        records = json.loads(text) if kind == ".json" else [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not {kind[1:]} ({error}): fix the file") from error
    for record in records if isinstance(records, list) else [records]:
        if isinstance(record, Mapping):
            yield record


def _as_prompt(record: Mapping[str, Any], source: str, loaded: LoadedEngine, settings: TrainSettings) -> Prompt | None:
    """Return the prompt of a record; None if it has none, or one that is too long."""
    messages = _messages_of(record)
    if messages is None:
        text = record.get("text")
        return _from_text(text, source, loaded, settings) if isinstance(text, str) and text.strip() else None
    keeps = settings.answers == "keep"
    last = max((index for index, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    if last < 0:
        return None
    try:
        prompt = chat_token_ids(loaded, messages[: last + 1])
        if len(prompt) > settings.max_prompt_tokens:
            return None
        if not keeps:
            return Prompt(prompt, source)
        answer = messages[last + 1]["content"] if last + 1 < len(messages) else None
        if not isinstance(answer, str) or not answer:
            return None
        end = [loaded.input_processor.eos_token_ids[0]] if loaded.input_processor.eos_token_ids else []
        ids = [*loaded.input_processor.tokenizer.encode_as_text(answer), *end][: settings.max_answer_tokens]
    except RequestError:
        return None  # the chat template rejects it
    return Prompt([*prompt, *ids], source, [False] * len(prompt) + [True] * len(ids))


def chat_token_ids(loaded: LoadedEngine, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the tokens of a conversation, with the beginning of the answer; without a chat template the last text as it is."""
    tokenizer = loaded.input_processor.tokenizer
    if tokenizer.has_chat_template:
        return loaded.input_processor.chat_token_ids(messages)
    return tokenizer.encode(str(messages[-1]["content"]))


def _messages_of(record: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    messages = record.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(one, Mapping) for one in messages):
        return messages
    turns = record.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return [{"role": "user", "content": turns[0].removeprefix("USER: ")}]
    text = next((record[key] for key in _PROMPT_KEYS if isinstance(record.get(key), str) and record[key].strip()), None)
    if text is None:
        return None
    if isinstance(record.get("input"), str) and record["input"].strip():
        text = f"{text}\n\n{record['input']}"
    answer = next((record[key] for key in _ANSWER_KEYS if isinstance(record.get(key), str)), None)
    return [{"role": "user", "content": text}, *([] if answer is None else [{"role": "assistant", "content": answer}])]


def _from_text(text: str, source: str, loaded: LoadedEngine, settings: TrainSettings) -> Prompt | None:
    """Return the beginning of a text, which the target continues, or a piece of it as it is."""
    keeps = settings.answers == "keep"
    ids = loaded.input_processor.tokenizer.encode(text[: 16 * settings.max_tokens])
    length = min(len(ids), settings.max_tokens if keeps else min(_PIECE_TOKENS, settings.max_prompt_tokens))
    if length < _LEAST_TURN_TOKENS:
        return None
    return Prompt(ids[:length], source, [False] + [True] * (length - 1) if keeps else None)


def write_own_prompts(
    loaded: LoadedEngine, settings: TrainSettings, count: int, print_line: Callable[[str], None] = lambda _: None
) -> list[Prompt]:
    """Return `count` user turns that the target writes itself, or as many as it writes that end and differ.

    Without a chat template they are beginnings of texts. `print_line` gets a line of progress now and then.

    Raises:
        ConfigError: the target has neither a chat template nor a first token to continue.
    """
    tokenizer = loaded.input_processor.tokenizer
    header = _user_header(loaded)
    found: dict[str, Prompt] = {}
    for number in range(_MAX_ROUNDS * -(-count // _ROUND)):
        seeds = range(number * _ROUND, (number + 1) * _ROUND)
        length = _MAX_TURN_TOKENS if tokenizer.has_chat_template else min(32, settings.max_prompt_tokens // 2)
        params = [SamplingParams(max_tokens=length, temperature=1.0, top_p=0.95, seed=settings.seed * 2**20 + seed) for seed in seeds]
        for request in run(loaded, [header] * _ROUND, params):
            output = request.token_ids[len(header) :]
            text = tokenizer.decode(output).strip()
            if tokenizer.has_chat_template:
                if output and output[-1] in loaded.input_processor.eos_token_ids and len(output) > _LEAST_TURN_TOKENS and text:
                    with suppress(RequestError):  # too long, or rejected by the chat template
                        ids = chat_token_ids(loaded, [{"role": "user", "content": text}])
                        found.setdefault(text.lower(), Prompt(ids, SELF_MADE))
            elif len(output) == length:
                found.setdefault(text, Prompt([*header, *output], SELF_MADE))
        if len(found) >= count:
            break
        if number % _ROUNDS_BETWEEN_LINES == 0:
            print_line(f"prompts: the target wrote {len(found):,} of {count:,}")
    return [one for one in found.values() if len(one.token_ids) <= settings.max_prompt_tokens][:count]


def _user_header(loaded: LoadedEngine) -> list[int]:
    """Return the tokens of the chat template before the first user turn."""
    tokenizer = loaded.input_processor.tokenizer
    if tokenizer.has_chat_template:
        text = tokenizer.render_chat([{"role": "user", "content": _MARK}], add_generation_prompt=False)
        return tokenizer.encode(text[: text.index(_MARK)], add_special_tokens=False)
    first = tokenizer.encode("") or [one for one in (loaded.engine.runtime.config.bos_token_id,) if one is not None]
    if not first:
        raise ConfigError("the target has no chat template and no first token, so it cannot write prompts itself: give --data")
    return first

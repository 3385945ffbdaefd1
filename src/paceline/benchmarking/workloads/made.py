"""Prompts that are made: as token ids of the target, drawn at random, and copies with edits of what the target itself says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.benchmarking.workloads.prompt_files import Prompt
from paceline.errors import ConfigError, RequestError
from paceline.tokenizer.tokenizer import Tokenizer

RANDOM_TOKENS = 64
"""Length of a prompt of random tokens."""
EDITED_SHARE = 0.05
"""Of a prediction's tokens, those that are replaced."""
REQUEST = "Here is a text with a few wrong words:\n\n{text}\n\nWrite the text again without the mistakes, and nothing else."


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt in the target's tokens, and what its output may resemble (empty = nothing)."""

    prompt_ids: tuple[int, ...]
    prediction_ids: tuple[int, ...] = ()


def encode(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> Encoded:
    """A prompt's tokens; messages go through the model's chat template, or where it has none, as their texts.

    Raises:
        ConfigError: an id does not exist, or there is no token.
        RequestError: the tokenizer or the template refuses it.
    """
    ids = _conversation(prompt, tokenizer) if prompt.messages else list(prompt.token_ids) or tokenizer.encode(prompt.text or "")
    guess = prompt.prediction
    prediction = tokenizer.encode(guess, add_special_tokens=False) if isinstance(guess, str) else list(guess or ())
    if not ids:
        raise ConfigError("a prompt has no token: give a longer text")
    wrong = [token_id for token_id in (*ids, *prediction) if token_id >= vocab_size]
    if wrong:
        raise ConfigError(f"a prompt holds the token id {wrong[0]}: ids of this model are below {vocab_size}")
    return Encoded(tuple(ids), tuple(prediction))


def random_prompts(count: int, vocab_size: int, seed: int) -> list[Encoded]:
    """Token ids drawn uniformly."""
    drawn = np.random.default_rng(seed).integers(0, vocab_size, (count, RANDOM_TOKENS))
    return [Encoded(tuple(int(token_id) for token_id in row)) for row in drawn]


def edited(token_ids: Sequence[int], vocab_size: int, seed: int) -> tuple[int, ...]:
    """The same with `EDITED_SHARE` of the tokens replaced by others, at least one."""
    random = np.random.default_rng(seed)
    count = max(1, round(EDITED_SHARE * len(token_ids)))
    changed = list(token_ids)
    for position in random.choice(len(token_ids), count, replace=False):
        changed[position] = (changed[position] + int(random.integers(1, vocab_size))) % vocab_size
    return tuple(changed)


def copies(
    prompts: Sequence[Encoded],
    answer: Callable[[Encoded], Sequence[int]],
    tokenizer: Tokenizer,
    *,
    in_prompt: bool,
    vocab_size: int,
    seed: int,
) -> list[Encoded]:
    """Prompts whose answers resemble a text that is known: the target's own greedy answer with edits, as the prediction.

    Args:
        answer: the target's greedy answer to a prompt.
        in_prompt: the prompt holds the edited answer and asks for it without mistakes.
    """
    made = []
    for index, prompt in enumerate(prompts):
        guess = edited(answer(prompt), vocab_size, seed + index)
        ids = prompt.prompt_ids
        if in_prompt:
            message = {"role": "user", "content": REQUEST.format(text=tokenizer.decode(guess))}
            ids = tuple(_conversation(Prompt(messages=(message,)), tokenizer))
        made.append(Encoded(ids, guess))
    return made


def _conversation(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    if tokenizer.has_chat_template:
        return tokenizer.apply_chat_template(prompt.messages)
    texts = [message.get("content") for message in prompt.messages]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError("this model has no chat template and a message's content is no text: give texts", parameter="messages")
    return tokenizer.encode("\n".join(map(str, texts)) + "\n")

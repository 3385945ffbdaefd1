"""Turn workloads into requests: prompts as token ids of the target, and the same orders for every mode."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.benchmarking.plan import BenchPlan
from paceline.benchmarking.workloads import NAMES, RANDOM, Workload, builtin_workload, read_spec_bench
from paceline.engine.input_processor import InputProcessor
from paceline.errors import ConfigError, RequestError
from paceline.models.config import ModelConfig
from paceline.prompt_file import PromptLine, read_prompts
from paceline.tokenizer.tokenizer import Tokenizer

RANDOM_TOKENS = 64
"""Length of a prompt of random tokens."""
EDITED_SHARE = 0.05
"""Share of a prediction's tokens that are replaced."""
REQUEST = "Here is a text with a few wrong words:\n\n{text}\n\nWrite the text again without the mistakes, and nothing else."
MAX_PROMPT_TOKENS = 1 << 30
"""Longest prompt, in tokens, that is encoded. Prompts that are too long for the context are left out afterwards."""
COMMON_CONTEXT = 1024
"""Minimum context of all modes, where the model allows it."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt in the target's tokens, and what its output may resemble (empty = nothing)."""

    prompt_ids: tuple[int, ...]
    prediction_ids: tuple[int, ...] = ()


def encode(prompt: PromptLine, tokenizer: Tokenizer, vocab_size: int) -> EncodedPrompt:
    """Encode a prompt; messages go through the model's chat template, or are joined where it has none.

    Raises:
        ConfigError: an id does not exist, or there is no token.
        RequestError: the tokenizer or the template refuses it.
    """
    ids = _conversation(prompt, tokenizer) if prompt.messages else list(prompt.token_ids) or tokenizer.encode(prompt.text or "")
    given = prompt.prediction
    prediction = tokenizer.encode(given, add_special_tokens=False) if isinstance(given, str) else list(given or ())
    if not ids:
        raise ConfigError("a prompt has no token: give a longer text")
    wrong = [token_id for token_id in (*ids, *prediction) if token_id >= vocab_size]
    if wrong:
        raise ConfigError(f"a prompt holds the token id {wrong[0]}: ids of this model are below {vocab_size}")
    return EncodedPrompt(tuple(ids), tuple(prediction))


def _encode_one(workload: Workload, index: int, tokenizer: Tokenizer, vocab_size: int) -> EncodedPrompt:
    try:
        return encode(workload.prompts[index], tokenizer, vocab_size)
    except (ConfigError, RequestError) as error:
        raise ConfigError(f"prompt {index + 1} of {workload.name!r}: {error}") from error


def random_prompts(count: int, vocab_size: int, seed: int) -> list[EncodedPrompt]:
    drawn = np.random.default_rng(seed).integers(0, vocab_size, (count, RANDOM_TOKENS))
    return [EncodedPrompt(tuple(int(token_id) for token_id in row)) for row in drawn]


def replace_tokens(token_ids: Sequence[int], vocab_size: int, seed: int) -> tuple[int, ...]:
    """Return the tokens with a share of `EDITED_SHARE` replaced, at least one."""
    random = np.random.default_rng(seed)
    count = max(1, round(EDITED_SHARE * len(token_ids)))
    changed = list(token_ids)
    for position in random.choice(len(token_ids), count, replace=False):
        changed[position] = (changed[position] + int(random.integers(1, vocab_size))) % vocab_size
    return tuple(changed)


def make_copy_prompts(
    prompts: Sequence[EncodedPrompt],
    answer: Callable[[EncodedPrompt], Sequence[int]],
    tokenizer: Tokenizer,
    *,
    in_prompt: bool,
    vocab_size: int,
    seed: int,
) -> list[EncodedPrompt]:
    """Make prompts with predictions: the target's own greedy output with some tokens replaced.

    Args:
        answer: the target's greedy answer to a prompt.
        in_prompt: the prompt holds the replace_tokens answer and asks for it without mistakes.
    """
    made = []
    for index, prompt in enumerate(prompts):
        prediction = replace_tokens(answer(prompt), vocab_size, seed + index)
        ids = prompt.prompt_ids
        if in_prompt:
            message = {"role": "user", "content": REQUEST.format(text=tokenizer.decode(prediction))}
            ids = tuple(_conversation(PromptLine(messages=(message,)), tokenizer))
        made.append(EncodedPrompt(ids, prediction))
    return made


def _conversation(prompt: PromptLine, tokenizer: Tokenizer) -> list[int]:
    if tokenizer.has_chat_template:
        return InputProcessor(tokenizer, tokenizer.vocab_size, MAX_PROMPT_TOKENS, ()).chat_token_ids(prompt.messages)
    texts = [message.get("content") for message in prompt.messages]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError("this model has no chat template and a message's content is no text: give texts", parameter="messages")
    return tokenizer.encode("\n".join(map(str, texts)) + "\n")


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """One request of a workload, or a batch.

    Attributes:
        index: of its first prompt within the workload.
    """

    workload: str
    temperature: float
    index: int
    prompts: tuple[EncodedPrompt, ...]

    @property
    def has_predictions(self) -> bool:
        return all(prompt.prediction_ids for prompt in self.prompts)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.prompt_ids) for prompt in self.prompts)

    def as_dict(self, tokens: int, seed: int) -> dict[str, Any]:
        """Return the JSON object for a worker."""
        requests = [
            {
                "prompt_ids": list(prompt.prompt_ids),
                "max_tokens": tokens,
                "temperature": self.temperature,
                "seed": seed + self.index + place,
                **({"prediction": list(prompt.prediction_ids)} if prompt.prediction_ids else {}),
            }
            for place, prompt in enumerate(self.prompts)
        ]
        return requests[0] if len(requests) == 1 else {"batch": requests}


@dataclass(frozen=True, slots=True)
class EncodedWorkloads:
    """Prompts in the target's tokens.

    Attributes:
        prompts: of each workload by name; of one that makes make_copy_prompts, those whose answers are copied.
        copied: names of workloads that make make_copy_prompts.
        notices: about prompts that were left out.
    """

    prompts: dict[str, list[EncodedPrompt]]
    copied: tuple[str, ...]
    vocab_size: int
    context: int
    notices: tuple[str, ...] = ()

    @property
    def has_predictions(self) -> bool:
        return bool(self.copied) or any(one.prediction_ids for own in self.prompts.values() for one in own)


def select_workloads(plan: BenchPlan) -> list[Workload]:
    """Return the workloads of the table and of files.

    Raises:
        ConfigError: one is unknown, a file cannot be read, or two have one name.
    """
    names = plan.workloads if plan.workloads or plan.prompts or plan.spec_bench else NAMES
    chosen = [builtin_workload(name) for name in dict.fromkeys(names)]
    if plan.prompts is not None:
        chosen.append(Workload(plan.prompts.stem, tuple(read_prompts(plan.prompts))))
    if plan.spec_bench is not None:
        chosen += [Workload(category, tuple(prompts)) for category, prompts in read_spec_bench(plan.spec_bench).items()]
    name, count = Counter(workload.name for workload in chosen).most_common(1)[0]
    if count > 1:
        raise ConfigError(f"two workloads are called {name!r}: leave out one of them, or rename the file of prompts")
    return chosen


def encode_workloads(
    plan: BenchPlan, workloads: Sequence[Workload], config: ModelConfig, tokenizer: Tokenizer, size: tuple[int, int]
) -> EncodedWorkloads:
    """Encode the prompts of each workload.

    Args:
        size: prompts of each workload, and tokens of each output.

    Raises:
        ConfigError, RequestError: a prompt cannot be turned into this model's tokens, or none is short enough.
    """
    num_prompts, tokens = size
    vocab_size = min(config.vocab_size, tokenizer.vocab_size)
    prompts, notices = {}, []
    room = config.max_positions - tokens
    for workload in workloads:
        if workload.name == RANDOM:
            found = random_prompts(num_prompts, vocab_size, plan.seed)
        else:
            found = [_encode_one(workload, index, tokenizer, vocab_size) for index in range(min(num_prompts, len(workload.prompts)))]
            if len(found) < len(workload.prompts) and workload.name == (plan.prompts and plan.prompts.stem):
                notices.append(
                    f"the first {len(found)} of {len(workload.prompts)} prompts of {workload.name!r} are used: see --num-prompts"
                )
        fitting = [prompt for prompt in found if len(prompt.prompt_ids) <= room]
        if not fitting:
            raise ConfigError(
                f"no prompt of {workload.name!r} leaves room for {tokens} tokens in a context of {config.max_positions}: lower --max-tokens"
            )
        if len(fitting) < len(found):
            notices.append(
                f"{len(found) - len(fitting)} of {len(found)} prompts of {workload.name!r} are longer than the context: left out"
            )
        prompts[workload.name] = fitting
    longest = max(len(prompt.prompt_ids) for own in prompts.values() for prompt in own)
    context = min(config.max_positions, max(COMMON_CONTEXT, longest + 2 * tokens + 256))
    copied = tuple(workload.name for workload in workloads if workload.makes_copies)
    return EncodedWorkloads(prompts, copied, vocab_size, context, tuple(notices))


def make_worker_requests(workload: str, temperature: float, prompts: Sequence[EncodedPrompt], batch_size: int) -> list[WorkerRequest]:
    """Return the requests of a cell; an incomplete last batch is filled up with the first prompts."""
    orders = []
    for start in range(0, len(prompts), batch_size):
        own = tuple(prompts[(start + place) % len(prompts)] for place in range(batch_size))
        orders.append(WorkerRequest(workload, temperature, start, own))
    return orders

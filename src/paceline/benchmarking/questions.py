"""From workloads to what workers are asked: cells, and in each the same orders for every mode."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.benchmarking.plan import BenchPlan
from paceline.benchmarking.workloads import RANDOM, Workload, of_file, of_spec_bench, own_workloads
from paceline.benchmarking.workloads.made import Encoded, encode, random_prompts
from paceline.errors import ConfigError
from paceline.models.config import ModelConfig
from paceline.tokenizer.tokenizer import Tokenizer

COMMON_CONTEXT = 1024
"""Tokens that there is room for at least, where the model has it."""


@dataclass(frozen=True, slots=True)
class Order:
    """One request of a workload, or a batch.

    Attributes:
        index: of its first prompt within the workload.
    """

    workload: str
    temperature: float
    index: int
    prompts: tuple[Encoded, ...]

    @property
    def has_predictions(self) -> bool:
        return all(prompt.prediction_ids for prompt in self.prompts)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.prompt_ids) for prompt in self.prompts)

    def as_dict(self, tokens: int, seed: int) -> dict[str, Any]:
        """As a worker reads it."""
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
class Questions:
    """Prompts in the target's tokens.

    Attributes:
        prompts: of each workload by name; of one that makes copies, those whose answers are copied.
        copied: names of workloads that make copies.
        notices: about prompts that were left out.
    """

    prompts: dict[str, list[Encoded]]
    copied: tuple[str, ...]
    vocab_size: int
    context: int
    notices: tuple[str, ...] = ()

    @property
    def has_predictions(self) -> bool:
        return bool(self.copied) or any(one.prediction_ids for own in self.prompts.values() for one in own)


def chosen_workloads(plan: BenchPlan) -> list[Workload]:
    """Those of the table and of files.

    Raises:
        ConfigError: one is unknown, a file cannot be read, or two have one name.
    """
    chosen = own_workloads(plan.workload_names)
    if plan.prompts is not None:
        chosen.append(of_file(plan.prompts))
    if plan.spec_bench is not None:
        chosen += of_spec_bench(plan.spec_bench)
    names = [workload.name for workload in chosen]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two workloads are called {twice!r}: leave out one of them, or rename the file of prompts")
    return chosen


def ask_in_tokens(
    plan: BenchPlan, workloads: Sequence[Workload], config: ModelConfig, tokenizer: Tokenizer, size: tuple[int, int]
) -> Questions:
    """The prompts of each workload, as many as are wanted.

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
            found = [encode(prompt, tokenizer, vocab_size) for prompt in workload.prompts[:num_prompts]]
        fitting = [prompt for prompt in found if len(prompt.prompt_ids) <= room]
        if not fitting:
            raise ConfigError(
                f"no prompt of {workload.name!r} leaves room for {tokens} tokens in a context of {config.max_positions}: lower --tokens"
            )
        if len(fitting) < len(found):
            notices.append(
                f"{len(found) - len(fitting)} of {len(found)} prompts of {workload.name!r} are longer than the context: left out"
            )
        prompts[workload.name] = fitting
    longest = max(len(prompt.prompt_ids) for own in prompts.values() for prompt in own)
    context = min(config.max_positions, max(COMMON_CONTEXT, longest + 2 * tokens + 256))
    copied = tuple(workload.name for workload in workloads if workload.makes_copies)
    return Questions(prompts, copied, vocab_size, context, tuple(notices))


def orders_of(workload: str, temperature: float, prompts: Sequence[Encoded], batch_size: int) -> list[Order]:
    """The orders of a cell; a last batch that is not full begins again with the first prompts."""
    orders = []
    for start in range(0, len(prompts), batch_size):
        own = tuple(prompts[(start + place) % len(prompts)] for place in range(batch_size))
        orders.append(Order(workload, temperature, start, own))
    return orders

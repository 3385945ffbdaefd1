"""Smaller models of the same family, trained with the same tokenizer: draft models as they are."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.proof.recommendation.published import plain_name

MOST_OF_TARGET = 0.5
"""A sibling with more than this share of the target's parameters costs nearly as much as the target."""
_MOST_NAMED = 2
_SIZE = re.compile(r"(?<![a-z0-9.])\d+(?:\.\d+)?[bm](?![a-z0-9])")


@dataclass(frozen=True, slots=True)
class Sibling:
    """A model of a family: its hub id and its parameters, about."""

    hub_id: str
    parameters: float


def _sizes(pattern: str, *sizes: str) -> tuple[Sibling, ...]:
    return tuple(Sibling(pattern.format(size), float(size[:-1]) * (1e9 if size[-1] in "bB" else 1e6)) for size in sizes)


FAMILIES: tuple[tuple[Sibling, ...], ...] = (
    (*_sizes("Qwen/Qwen3-{}", "0.6B", "1.7B", "4B", "8B", "14B", "32B"), Sibling("Qwen/Qwen3-30B-A3B", 30e9)),
    _sizes("Qwen/Qwen2.5-{}-Instruct", "0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B"),
    _sizes("Qwen/Qwen2.5-{}", "0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B"),
    _sizes("Qwen/Qwen2.5-Coder-{}-Instruct", "0.5B", "1.5B", "3B", "7B", "14B", "32B"),
    _sizes("Qwen/Qwen2-{}-Instruct", "0.5B", "1.5B", "7B", "72B"),
    (
        *_sizes("meta-llama/Llama-3.2-{}-Instruct", "1B", "3B"),
        *_sizes("meta-llama/Llama-3.1-{}-Instruct", "8B", "70B"),
        *_sizes("meta-llama/Meta-Llama-3.1-{}-Instruct", "8B", "70B"),
        *_sizes("meta-llama/Llama-3.3-{}-Instruct", "70B"),
    ),
    (*_sizes("meta-llama/Llama-3.2-{}", "1B", "3B"), *_sizes("meta-llama/Llama-3.1-{}", "8B", "70B")),
    _sizes("google/gemma-2-{}-it", "2b", "9b", "27b"),
    _sizes("google/gemma-3-{}-it", "270m", "1b", "4b", "12b", "27b"),
    _sizes("HuggingFaceTB/SmolLM2-{}-Instruct", "135M", "360M", "1.7B"),
)
"""Models of one tokenizer. Whether two have the same vocabulary is compared, piece by piece, once both are here."""


def smaller_siblings(names: Iterable[str]) -> list[Sibling]:
    """The smallest models of the target's family, at most two, smallest first; none that is not far smaller.

    Args:
        names: the target's, as `recommend.names_of` gives them.
    """
    wanted = set(names)
    for family in FAMILIES:
        target = next((member for member in family if plain_name(member.hub_id) in wanted), None)
        if target is not None:
            smaller = [member for member in family if member.parameters <= MOST_OF_TARGET * target.parameters]
            return sorted(smaller, key=lambda member: member.parameters)[:_MOST_NAMED]
    return []


def are_siblings(names: Iterable[str], others: Iterable[str]) -> bool:
    """Whether names say that two models are of one family: both of the same one of `FAMILIES`, or equal but for a size.

    Args:
        names, others: of each, as `recommend.names_of` gives them.
    """
    both = set(names), set(others)
    for family in FAMILIES:
        members = {plain_name(member.hub_id) for member in family}
        if members & both[0] and members & both[1]:
            return True
    sizeless = [{_SIZE.sub("", name) for name in one if _SIZE.search(name)} for one in both]
    return bool(sizeless[0] & sizeless[1])

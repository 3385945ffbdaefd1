"""Who runs when, and how much fits into the time: numbers only."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from paceline.benchmarking.plan import DEFAULT_PROMPTS, DEFAULT_ROUNDS, DEFAULT_TOKENS

LEAST_ROUNDS = 3
SHORT_TOKENS = 32

Item = TypeVar("Item")


def in_turn(modes: Sequence[Item], turn: int) -> list[Item]:
    """The modes one after another, beginning with another one each turn: A B C, B C A, C A B."""
    first = turn % len(modes) if modes else 0
    return [*modes[first:], *modes[:first]]


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured: counted rounds, output tokens, prompts of each workload."""

    rounds: int = DEFAULT_ROUNDS
    tokens: int = DEFAULT_TOKENS
    prompts: int = DEFAULT_PROMPTS

    def seconds(self, turn_s: float, turn_tokens: int, num_cells: int, batch_size: int) -> float:
        """What it takes, the first round with it.

        Args:
            turn_s: seconds in which every mode answered one order of `turn_tokens` tokens.
        """
        return (1 + self.rounds) * num_cells * -(-self.prompts // batch_size) * turn_s * self.tokens / turn_tokens


def fitted(wanted: Size, fixed: frozenset[str], limit_s: float, *, turn_s: float, num_cells: int, batch_size: int = 1) -> Size:
    """The size made smaller until it fits: fewer prompts first, then rounds, then tokens.

    Args:
        fixed: names of fields that the user gave; they stay.
        limit_s: time that is left. Where nothing more can be made smaller the result takes longer.
        turn_s: as for `Size.seconds`, with `wanted.tokens`.
    """
    size = wanted
    while size.seconds(turn_s, wanted.tokens, num_cells, batch_size) > limit_s:
        if size.prompts > 1 and "prompts" not in fixed:
            size = replace(size, prompts=size.prompts - 1)
        elif size.rounds > LEAST_ROUNDS and "rounds" not in fixed:
            size = replace(size, rounds=size.rounds - 1)
        elif size.tokens > SHORT_TOKENS and "tokens" not in fixed:
            size = replace(size, tokens=max(SHORT_TOKENS, size.tokens // 2))
        else:
            break
    return size

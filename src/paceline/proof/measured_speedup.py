"""Measure the speedup of loaded drafters on two kinds of text: new prose, and text that copies its prompt.

A draft brings nothing where there is none, so a speedup cannot be predicted from acceptance rates alone. Both kinds are generated plainly
and with drafts in turns; the tokens are the same, so the ratio of decoding times is the speedup.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from paceline.sampling.params import SamplingParams
from paceline.tokenizer.vocabulary import SAMPLE_TEXT

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.outputs import RequestOutput

NEW_PROSE, COPYING = "new prose", "copying"
_NUM_TEXTS, _PROMPT_WORDS, _PASSAGE_WORDS, _TOKENS = 3, 8, 40, 40
_ROUNDS = 3  # counted; one more comes first, in which costs and acceptance are learnt
_SECONDS = 30.0  # no round begins later
_TEMPERATURE = 0.7  # of new prose: greedy texts of small models repeat themselves, which is easy to draft


@dataclass(frozen=True, slots=True)
class MeasuredSpeedup:
    """The speedup of one kind of text.

    Attributes:
        kind: "new prose" or "copying".
        speedup: median over texts and rounds.
        draft_share: share of steps that used a draft.
        acceptance_rate: accepted share of draft tokens.
        num_tokens: tokens of one text and mode.
    """

    kind: str
    speedup: float
    draft_share: float
    acceptance_rate: float
    num_tokens: int


def measure_speedups(llm: "LLM") -> tuple[MeasuredSpeedup, ...]:
    """Measure both kinds; a kind that does not fit the context is left out, and all without drafters."""
    if llm.drafter is None or llm.max_model_len < 4 * _TOKENS:
        return ()
    words = SAMPLE_TEXT.split(" ")
    starts = [len(words) * index // _NUM_TEXTS for index in range(_NUM_TEXTS)]
    prose = [" ".join(words[start:][:_PROMPT_WORDS]) for start in starts]
    passages = [" ".join(words[start:][:_PASSAGE_WORDS]) for start in starts]
    copies = [f"{passage}\n\n{passage}\n\n{' '.join(passage.split(' ')[:_PROMPT_WORDS])}" for passage in passages]
    kinds = [(NEW_PROSE, prose, _TEMPERATURE), (COPYING, copies, 0.0)]
    return tuple(_measure(llm, kind, prompts, temperature) for kind, prompts, temperature in kinds)


def _measure(llm: "LLM", kind: str, prompts: Sequence[str], temperature: float) -> MeasuredSpeedup:
    ratios: list[float] = []
    drafted: list[RequestOutput] = []
    start = time.perf_counter()
    for number in range(1 + _ROUNDS):
        if number > 1 and time.perf_counter() - start > _SECONDS / 2:
            break
        params = SamplingParams(max_tokens=_TOKENS, temperature=temperature, seed=number, ignore_eos=True)
        for prompt in prompts:
            (plain,) = llm.generate(prompt, params, speculation={"enabled": False})
            (output,) = llm.generate(prompt, params)
            if number > 0:
                drafted.append(output)
                ratios.append(plain.timing.decode_s / output.timing.decode_s)
    stats = [output.speculation for output in drafted]
    num_drafted = sum(one.num_draft_tokens for one in stats)
    return MeasuredSpeedup(
        kind,
        median(ratios),
        1 - sum(one.plain_steps for one in stats) / max(1, sum(one.steps for one in stats)),
        sum(one.num_accepted_tokens for one in stats) / max(1, num_drafted),
        _TOKENS,
    )

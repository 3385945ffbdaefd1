"""Measure the speedup of loaded drafters on two kinds of text: new prose, and text that copies its prompt.

A draft brings nothing where there is none, so a speedup cannot be predicted from acceptance rates alone. Texts of both kinds are generated
plainly and with drafts in turns. Their tokens are the same, so the ratio of decoding times is the speedup. Texts differ more than repeated
measurements of one text do: each text is generated once.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.sampling.params import SamplingParams

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.outputs import RequestOutput

    OutputPair = tuple[RequestOutput, RequestOutput]

NEW_PROSE, COPYING = "new prose", "copying"
_PROSE_TOKENS = 128
_PASSAGE_TOKENS = 128  # length of a copied passage: the prompt contains it twice, and its first _COPIED_BEFORE tokens a third time
_COPIED_BEFORE, _COPIED_TOKENS = 16, 112
_WARM_UP_TEXTS = 2  # texts of each kind that are not counted: they warm up the cost model and acceptance rates
_SECONDS = 20.0  # for each kind: no text begins later
_TEMPERATURE = 0.7  # for new prose: greedy texts of small models repeat themselves, which is easy to draft
_PROSE_OPENINGS = (
    "The old lighthouse keeper had never", "Most people think that bread is",
    "In the spring of that year, the village", "My first week at the new job was", "A volcano is a mountain that",
    "There was once a boy who wanted", "The meeting began late because", "When the rain finally stopped, we",
    "To plant a small garden, you", "She opened the letter and read", "The history of the bicycle starts",
    "Our teacher told us that the moon", "On the last day of the journey", "If you have trouble sleeping, it",
    "The dog looked at the door and", "Every morning the fisherman went", "The museum in the old town shows",
    "Nobody knew why the bridge had",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MeasuredSpeedup:
    """The speedup of one kind of text.

    Attributes:
        kind: "new prose" or "copying".
        speedup: decoding time of all texts without drafts, divided by that with drafts.
        draft_share: share of steps that used a draft.
        acceptance_rate: accepted share of draft tokens.
        num_texts: number of texts.
        num_tokens: maximum number of tokens of a text.
    """

    kind: str
    speedup: float
    draft_share: float
    acceptance_rate: float
    num_texts: int
    num_tokens: int


def measure_speedups(llm: "LLM") -> tuple[MeasuredSpeedup, ...]:
    """Measure both kinds; none without drafters, or if the context is too short. The texts to copy are beginnings of the new prose.

    Of the latter only those count that the model copied to the end, because the others are not copies; if it copied none, all count.
    """
    if llm.drafter is None or llm.max_model_len < 3 * _PASSAGE_TOKENS:
        return ()
    prose = _generate_twice(llm, _PROSE_OPENINGS, SamplingParams(max_tokens=_PROSE_TOKENS, temperature=_TEMPERATURE, ignore_eos=True))
    passages = [list(drafted.token_ids[:_PASSAGE_TOKENS]) for _, drafted in prose]
    prompts = [2 * passage + passage[:_COPIED_BEFORE] for passage in passages]
    copies = _generate_twice(llm, prompts, SamplingParams(max_tokens=_COPIED_TOKENS, temperature=0.0, ignore_eos=True))
    ends = [passage[_COPIED_BEFORE : _COPIED_BEFORE + _COPIED_TOKENS] for passage in passages]
    is_copied = [
        list(pair[1].token_ids) == end for pair, end in zip(copies, ends, strict=False)
    ]  # no text begins late, so there may be fewer
    prose, copies = prose[_num_warm_up(prose) :], copies[_num_warm_up(copies) :]
    exact = [pair for pair, counts in zip(copies, is_copied[-len(copies) :], strict=True) if counts]
    return _summarize(NEW_PROSE, prose, _PROSE_TOKENS), _summarize(COPYING, exact or copies, _COPIED_TOKENS)


def _generate_twice(
    llm: "LLM", prompts: Sequence[str | list[int]], params: SamplingParams
) -> list[tuple["RequestOutput", "RequestOutput"]]:
    """Return the outputs of each prompt without drafts and with them, of one seed and therefore with the same tokens."""
    found: list[OutputPair] = []
    begin = time.perf_counter()
    for index, prompt in enumerate(prompts):
        if len(found) > _WARM_UP_TEXTS and time.perf_counter() - begin > _SECONDS:
            break
        seeded = replace(params, seed=index)
        (plain,) = llm.generate(prompt, seeded, speculation={"enabled": False})
        (drafted,) = llm.generate(prompt, seeded)
        found.append((plain, drafted))
    return found


def _num_warm_up(pairs: Sequence[object]) -> int:
    return min(_WARM_UP_TEXTS, len(pairs) - 1)


def _summarize(kind: str, pairs: "Sequence[OutputPair]", num_tokens: int) -> MeasuredSpeedup:
    stats = [drafted.speculation for _, drafted in pairs]
    return MeasuredSpeedup(
        kind,
        sum(plain.timing.decode_s for plain, _ in pairs) / sum(drafted.timing.decode_s for _, drafted in pairs),
        1 - sum(one.plain_steps for one in stats) / max(1, sum(one.steps for one in stats)),
        sum(one.num_accepted_tokens for one in stats) / max(1, sum(one.num_draft_tokens for one in stats)),
        len(pairs),
        num_tokens,
    )

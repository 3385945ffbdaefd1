"""Measure the speedup of loaded drafters on two kinds of text: new prose, and text that copies its prompt.

A draft brings nothing where there is none, so a speedup cannot be predicted from acceptance rates alone. Texts of both kinds are generated
plainly and with drafts in turns. Their tokens are the same, so the ratio of decoding times is the speedup. Texts differ more than repeated
measurements of one text do: each text is generated once.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.sampling.params import SamplingParams

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.outputs import RequestOutput

NEW_PROSE, COPYING = "new prose", "copying"
_PROSE_TOKENS = 128
_PASSAGE_TOKENS = 64  # length of a copied passage: the prompt contains it twice, and its first _COPIED_BEFORE tokens a third time
_COPIED_BEFORE, _COPIED_TOKENS = 12, 48
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
    """Measure both kinds; none without drafters, or if the context is too short. The texts to copy are beginnings of the new prose."""
    if llm.drafter is None or llm.max_model_len < 2 * _PROSE_TOKENS:
        return ()
    params = SamplingParams(max_tokens=_PROSE_TOKENS, temperature=_TEMPERATURE, ignore_eos=True)
    prose, texts = _measure(llm, NEW_PROSE, _PROSE_OPENINGS, params)
    copies = [2 * text[:_PASSAGE_TOKENS] + text[:_COPIED_BEFORE] for text in texts]
    copying, _ = _measure(llm, COPYING, copies, SamplingParams(max_tokens=_COPIED_TOKENS, temperature=0.0, ignore_eos=True))
    return prose, copying


def _measure(llm: "LLM", kind: str, prompts: Sequence[str | list[int]], params: SamplingParams) -> tuple[MeasuredSpeedup, list[list[int]]]:
    """Return the speedup of a kind, and the token ids that were generated."""
    plain_s = drafted_s = 0.0
    drafted, texts = list["RequestOutput"](), list[list[int]]()
    begin = time.perf_counter()
    for index, prompt in enumerate(prompts):
        if drafted and time.perf_counter() - begin > _SECONDS:
            break
        (plain,) = llm.generate(prompt, params, speculation={"enabled": False})
        (output,) = llm.generate(prompt, params)
        texts.append(list(output.token_ids))
        if index >= min(_WARM_UP_TEXTS, len(prompts) - 1):
            drafted.append(output)
            plain_s, drafted_s = plain_s + plain.timing.decode_s, drafted_s + output.timing.decode_s
    stats = [output.speculation for output in drafted]
    return MeasuredSpeedup(
        kind,
        plain_s / drafted_s if drafted_s else 1.0,
        1 - sum(one.plain_steps for one in stats) / max(1, sum(one.steps for one in stats)),
        sum(one.num_accepted_tokens for one in stats) / max(1, sum(one.num_draft_tokens for one in stats)),
        len(drafted),
        params.max_tokens or 0,
    ), texts

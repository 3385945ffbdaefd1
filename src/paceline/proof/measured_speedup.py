"""Measure the speedup of loaded drafters: on a user's prompts, or on new prose and on text that copies its prompt.

A draft brings nothing where there is none, so a speedup cannot be predicted from acceptance rates alone. All texts are
generated with drafts, and some of them without: a plain token always takes about the same time, whereas the speedup differs from text to
text. So in the same time more texts are measured than if all were generated twice.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from paceline.prompt_file import PromptLine
from paceline.sampling.params import SamplingParams

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.outputs import RequestOutput


NEW_PROSE, COPYING, GIVEN_PROMPTS = "new prose", "copying", "your prompts"
_PROSE_TOKENS = 128
_PASSAGE_TOKENS = 128  # length of a copied passage: the prompt contains it twice, and its first _COPIED_BEFORE tokens a third time
_COPIED_BEFORE, _COPIED_TOKENS = 16, 112
_ANSWER_TOKENS = 256  # of an answer to a user's prompt, at most
_WARM_UP_TEXTS = 2  # texts of each kind that are not counted: they warm up the cost model and acceptance rates
_RESAMPLES = 2000
_SECONDS = 30.0  # for each kind: no text begins later
_PLAIN_INTERVAL = 4  # every so many texts one is generated without drafts too
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
        kind: "new prose", "copying" or "your prompts".
        speedup: decoding seconds of a token without drafts, divided by those with drafts.
        interval: 95 % bootstrap interval of the speedup: texts are drawn again with replacement.
        draft_share: share of steps that used a draft.
        acceptance_rate: accepted share of draft tokens.
        num_texts: number of texts.
        num_tokens: maximum number of tokens of a text.
    """

    kind: str
    speedup: float
    interval: tuple[float, float]
    draft_share: float
    acceptance_rate: float
    num_texts: int
    num_tokens: int


def measure_speedups(llm: "LLM", prompts: Sequence[PromptLine] = ()) -> tuple[MeasuredSpeedup, ...]:
    """Measure the user's prompts, or both other kinds if there are none. Without drafters nothing is measured.

    Raises:
        RequestError: the model does not take one of the prompts.
    """
    if llm.drafter is None:
        return ()
    if prompts:
        return _measure_prompts(llm, prompts)
    return _measure_samples(llm) if llm.max_model_len >= 3 * _PASSAGE_TOKENS else ()


def _measure_prompts(llm: "LLM", prompts: Sequence[PromptLine]) -> tuple[MeasuredSpeedup, ...]:
    """Measure prompts in a random order, because files are often sorted. Conversations have the model's default sampling, texts none."""
    requests: list[tuple[str | list[int], SamplingParams]] = []
    for line in prompts:
        params = SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=0.0)
        if line.messages:
            requests.append((llm.chat_token_ids(line.messages), llm.sampling_defaults.fill_chat(params, ("max_tokens",))))
        else:
            requests.append((line.text or list(line.token_ids), params))
    measured = _Texts.generate(llm, Random(0).sample(requests, len(requests)))
    return (measured.summarize(GIVEN_PROMPTS, _ANSWER_TOKENS),) if measured.plain else ()


def _measure_samples(llm: "LLM") -> tuple[MeasuredSpeedup, ...]:
    """Measure both kinds of sample texts. The texts to copy are beginnings of the new prose.

    Of the latter only those count that the model copied to the end, because the others are not copies; if it copied none, all count.
    """
    prose_params = SamplingParams(max_tokens=_PROSE_TOKENS, temperature=_TEMPERATURE, ignore_eos=True)
    prose = _Texts.generate(llm, [(opening, prose_params) for opening in _PROSE_OPENINGS])
    passages = [list(text.token_ids[:_PASSAGE_TOKENS]) for text in prose.drafted]
    copy_params = SamplingParams(max_tokens=_COPIED_TOKENS, temperature=0.0, ignore_eos=True)
    copies = _Texts.generate(llm, [(2 * passage + passage[:_COPIED_BEFORE], copy_params) for passage in passages])
    ends = [passage[_COPIED_BEFORE : _COPIED_BEFORE + _COPIED_TOKENS] for passage in passages]
    is_copied = [list(text.token_ids) == end for text, end in zip(copies.drafted, ends, strict=False)]  # there may be fewer texts
    return prose.summarize(NEW_PROSE, _PROSE_TOKENS), copies.summarize(COPYING, _COPIED_TOKENS, is_copied)


@dataclass(frozen=True, slots=True)
class _Texts:
    """Outputs of the same requests, of one seed and therefore with the same tokens.

    Attributes:
        plain: without drafts, of every `_PLAIN_INTERVAL`th text.
        drafted: with drafts.
    """

    plain: "Sequence[RequestOutput]"
    drafted: "Sequence[RequestOutput]"

    @classmethod
    def generate(cls, llm: "LLM", requests: Sequence[tuple[str | list[int], SamplingParams]]) -> "_Texts":
        """Generate texts one after another, until the time is over. Texts of one token are left out."""
        plain: list[RequestOutput] = []
        drafted: list[RequestOutput] = []
        begin = time.perf_counter()
        for index, (prompt, params) in enumerate(requests):
            is_last = index + 1 == len(requests) or (index >= _WARM_UP_TEXTS and time.perf_counter() - begin > _SECONDS)
            seeded = replace(params, seed=index)
            (text,) = llm.generate(prompt, seeded)
            if len(text.token_ids) > 1:  # nothing is decoded for the first token, it comes with the prompt
                drafted.append(text)
                if len(drafted) % _PLAIN_INTERVAL == _WARM_UP_TEXTS + 1 or (is_last and not plain):
                    plain += llm.generate(prompt, seeded, speculation={"enabled": False})
            if is_last:
                break
        return cls(plain, drafted)

    def summarize(self, kind: str, num_tokens: int, counts: Sequence[bool] = ()) -> MeasuredSpeedup:
        """Compare the decoding times.

        Args:
            counts: for each text whether it counts; if none does, or without it, all count. The first texts are a warm-up.
        """
        first = min(_WARM_UP_TEXTS, len(self.drafted) - 1)
        texts = [text for text, counted in zip(self.drafted[first:], counts[first:], strict=True) if counted] if counts else []
        texts = texts or list(self.drafted[first:])
        stats = [text.speculation for text in texts]
        plain_s = sum(text.timing.decode_s for text in self.plain) / sum(map(_num_decoded, self.plain))
        decoded = np.array([(_num_decoded(text), text.timing.decode_s) for text in texts])
        drawn = decoded[np.random.default_rng(0).integers(len(texts), size=(_RESAMPLES, len(texts)))].sum(1)
        low, high = np.percentile(plain_s * drawn[:, 0] / drawn[:, 1], (2.5, 97.5))
        num_decoded, seconds = decoded.sum(0)
        return MeasuredSpeedup(
            kind,
            float(plain_s * num_decoded / seconds),
            (float(low), float(high)),
            1 - sum(one.plain_steps for one in stats) / max(1, sum(one.steps for one in stats)),
            sum(one.num_accepted_tokens for one in stats) / max(1, sum(one.num_draft_tokens for one in stats)),
            len(texts),
            num_tokens,
        )


def _num_decoded(text: "RequestOutput") -> int:
    """Return the number of tokens that the decoding time is about: all but the first."""
    return len(text.token_ids) - 1

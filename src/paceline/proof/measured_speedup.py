"""Measure the speedup by the loaded drafters, on a user's prompts or on samples: newly written prose, and text copied from the prompt.

A draft brings nothing where there is none, so a speedup cannot be predicted from acceptance rates alone. All texts are generated with
drafts, and some of them without: a plain token always takes about the same time, whereas the speedup differs from text to text. So in the
same time more texts are measured than if all were generated twice.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CapacityError, ConfigError, RequestError
from paceline.prompt_file import PromptLine
from paceline.repeats import repeat_share
from paceline.sampling.params import SamplingParams

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.outputs import RequestOutput


_Request: TypeAlias = tuple[str | list[int], SamplingParams, str | None]
"""A prompt, its parameters, and what the output will resemble."""
NEW_PROSE, COPYING, GIVEN_PROMPTS = "new prose", "copying", "your prompts"
_PROSE_TOKENS = 128
_PASSAGE_TOKENS = 128  # length of a copied passage: the prompt contains it twice, and its first _COPIED_BEFORE tokens a third time
_COPIED_BEFORE, _COPIED_TOKENS = 16, 112
_ANSWER_TOKENS = 256  # of an answer to a user's prompt, at most
_WARM_UP_TEXTS = 2  # texts of each kind that are not counted: they warm up the cost model and acceptance rates
_RESAMPLES = 2000
_LEAST_FOR_INTERVAL = 5  # texts
_MAX_PROMPTS = 500  # of a user's file: more cannot be measured in the time
_MIN_TEXTS = 16  # with fewer prompts than this, each is used several times with different seeds
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


class PromptError(ConfigError):
    """The model cannot take one of the user's prompts."""


@dataclass(frozen=True, slots=True)
class MeasuredSpeedup:
    """The speedup of one kind of text.

    Attributes:
        kind: "new prose", "copying" or "your prompts".
        speedup: decoding seconds of a token without drafts, divided by those with drafts.
        interval: 95 % bootstrap interval of the speedup: plain and drafted texts are drawn again with replacement. None = too few texts.
        draft_share: share of steps that used a draft.
        acceptance_rate: accepted share of draft tokens.
        repeats: share of the output that repeats itself (`repeat_share`).
        num_texts: number of texts.
        num_tokens: maximum number of tokens of a text.
    """

    kind: str
    speedup: float
    interval: tuple[float, float] | None
    draft_share: float
    acceptance_rate: float
    repeats: float
    num_texts: int
    num_tokens: int


def measure_speedups(llm: "LLM", prompts: Sequence[PromptLine] = ()) -> tuple[MeasuredSpeedup, ...]:
    """Measure the user's prompts, or the two sample workloads (new prose, copying) if there are none; nothing without a drafter.

    Raises:
        PromptError: the model does not take one of the prompts.
    """
    if llm.drafter is None:
        return ()
    if prompts:
        return _measure_prompts(llm, prompts)
    return _measure_sample_workloads(llm) if llm.max_model_len >= 3 * _PASSAGE_TOKENS else ()


def _measure_prompts(llm: "LLM", prompts: Sequence[PromptLine]) -> tuple[MeasuredSpeedup, ...]:
    """Measure the user's prompts in a random order (files are often sorted), with the model's recommended sampling."""
    numbered = Random(0).sample(list(enumerate(prompts, 1)), min(len(prompts), _MAX_PROMPTS))
    default = llm.sampling_defaults.apply_chat_defaults(SamplingParams(max_tokens=_ANSWER_TOKENS), ("max_tokens",))
    reads_predictions = "prediction" in llm.drafter_name.split("+")
    requests: list[_Request] = []
    for number, line in numbered:
        try:
            ids = llm.chat_token_ids(line.messages) if line.messages else llm.prompt_token_ids(line.text or list(line.token_ids))
            prediction = llm.tokenizer.decode(line.prediction) if isinstance(line.prediction, tuple) else line.prediction
            requests.append((ids, default, prediction if reads_predictions else None))
        except RequestError as error:
            raise PromptError(f"prompt {number} of --prompts: {error}") from error
    try:
        measured = _Texts.generate(llm, requests * -(-_MIN_TEXTS // len(requests)))
    except (RequestError, CapacityError) as error:  # no room for an answer, in the context or the cache
        raise PromptError(f"one of --prompts: {error}") from error
    return (measured.summarize(GIVEN_PROMPTS, _ANSWER_TOKENS),) if measured.plain else ()


def _measure_sample_workloads(llm: "LLM") -> tuple[MeasuredSpeedup, ...]:
    """Measure both sample workloads. The texts to be copied are the first tokens of the generated prose.

    Of the latter only those count that the model copied to the end, because the others are not copies; if it copied none, all count.
    """
    prose_params = SamplingParams(max_tokens=_PROSE_TOKENS, temperature=_TEMPERATURE, ignore_eos=True)
    prose = _Texts.generate(llm, [(opening, prose_params, None) for opening in _PROSE_OPENINGS])
    passages = [list(text.token_ids[:_PASSAGE_TOKENS]) for text in prose.drafted]
    copy_params = SamplingParams(max_tokens=_COPIED_TOKENS, temperature=0.0, ignore_eos=True)
    copies = _Texts.generate(llm, [(2 * passage + passage[:_COPIED_BEFORE], copy_params, None) for passage in passages])
    ends = [passage[_COPIED_BEFORE : _COPIED_BEFORE + _COPIED_TOKENS] for passage in passages]
    is_copied = [list(text.token_ids) == end for text, end in zip(copies.drafted, ends, strict=False)]  # there may be fewer texts
    return prose.summarize(NEW_PROSE, _PROSE_TOKENS), copies.summarize(COPYING, _COPIED_TOKENS, is_copied)


@dataclass(frozen=True, slots=True)
class _Texts:
    """Outputs of the same requests, of one seed and therefore with the same tokens.

    Attributes:
        plain: without drafts, of the first and every further `_PLAIN_INTERVAL`th text; the first is left out if there are others.
        drafted: with drafts.
    """

    plain: "Sequence[RequestOutput]"
    drafted: "Sequence[RequestOutput]"

    @classmethod
    def generate(cls, llm: "LLM", requests: Sequence[_Request]) -> "_Texts":
        """Generate texts one after another until the time limit. Texts of one token are left out."""
        plain: list[RequestOutput] = []
        drafted: list[RequestOutput] = []
        begin = time.perf_counter()
        for index, (prompt, params, prediction) in enumerate(requests):
            if len(drafted) > _WARM_UP_TEXTS and time.perf_counter() - begin > _SECONDS:
                break
            seeded = replace(params, seed=index)
            (text,) = llm.generate(prompt, seeded, prediction=prediction)
            if len(text.token_ids) > 1:  # nothing is decoded for the first token, it comes with the prompt
                drafted.append(text)
                if len(drafted) % _PLAIN_INTERVAL == 1:
                    plain += llm.generate(prompt, seeded, speculation={"enabled": False})
        return cls(plain[len(plain) > 1 :], drafted)

    def summarize(self, kind: str, num_tokens: int, counts: Sequence[bool] = ()) -> MeasuredSpeedup:
        """Compare the decoding times with and without drafts.

        Args:
            counts: for each text whether it counts; if none does, or without it, all count. The first texts are a warm-up.
        """
        first = min(_WARM_UP_TEXTS, len(self.drafted) - 1)
        texts = [text for text, counted in zip(self.drafted[first:], counts[first:], strict=True) if counted] if counts else []
        texts = texts or list(self.drafted[first:])
        stats = [text.speculation for text in texts]
        low, high = map(float, np.percentile(_resample(texts) / _resample(self.plain), (2.5, 97.5)))
        return MeasuredSpeedup(
            kind,
            _tokens_per_s(texts) / _tokens_per_s(self.plain),
            (low, high) if len(texts) >= _LEAST_FOR_INTERVAL else None,
            1 - sum(one.plain_steps for one in stats) / max(1, sum(one.steps for one in stats)),
            sum(one.num_accepted_tokens for one in stats) / max(1, sum(one.num_draft_tokens for one in stats)),
            repeat_share([text.token_ids for text in texts]),
            len(texts),
            num_tokens,
        )


def _tokens_per_s(texts: "Sequence[RequestOutput]") -> float:
    """Return the decoding speed: all tokens but the first of each text, by the seconds after it."""
    return sum(len(text.token_ids) - 1 for text in texts) / sum(text.timing.decode_s for text in texts)


def _resample(texts: "Sequence[RequestOutput]") -> NDArray[np.float64]:
    """Return decoding speeds of texts that are drawn with replacement."""
    decoded = np.array([(len(text.token_ids) - 1, text.timing.decode_s) for text in texts])
    drawn = decoded[np.random.default_rng(len(texts)).integers(len(texts), size=(_RESAMPLES, len(texts)))].sum(1)
    speeds: NDArray[np.float64] = drawn[:, 0] / drawn[:, 1]
    return speeds

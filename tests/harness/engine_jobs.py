"""Random requests for an engine, what each must get (what it gets alone, decoded plainly), and drafters that try to change that."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.answer_drafters import ChaosDrafter, OracleDrafter
from paceline import LLM, BackendUnavailableError, RequestError, SamplingParams
from paceline.config import EngineConfig
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.suffix import SuffixDrafter, SuffixStore
from paceline.engine import loader as loader_module
from paceline.engine.memory import CachePlan, plan_cache
from paceline.models.checkpoint import read_model_config
from paceline.models.config import ModelConfig
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.outputs import RequestOutput
from paceline.proof.exactness.adversaries import Answers, WrongDrafter
from paceline.sampling.grammars.grammar import Grammar
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import Drafter

BLOCK = 32
MAX_CONTEXT = 224
BEYOND = 12  # tokens after a stop, for drafters that ignore stops


def lean_to_others(token_ids: Sequence[int], scores: Any) -> Any:
    """A custom processor: the last two tokens are less likely."""
    for back, token in enumerate(token_ids[:-4:-1]):
        scores[token] -= 2.0 - 0.5 * back
    return scores


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy-penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    "no-repeat": {"no_repeat_ngram_size": 2},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "top-k-penalties": {"temperature": 1.3, "top_k": 20, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "free": {"temperature": 1.3},
    "few-tokens": {"temperature": 1.0, "logit_bias": {10: 40.0, 11: 40.0}},  # repeats itself
    "everything": {
        "temperature": 0.9,
        "min_p": 0.02,
        "logit_bias": {5: 2.0, 7: -3.0},
        "banned_token_ids": (9, 11),
        "min_tokens": 8,
        "repetition_penalty": 1.05,
    },
    "bad-words": {"temperature": 1.0, "frequency_penalty": 0.2},
    "stop-string": {"temperature": 1.1},
    "stop-id": {"temperature": 1.1, "min_p": 0.01},
    "min-tokens": {"temperature": 0.7},
    "eos": {"temperature": 1.2},
    "samples": {"temperature": 1.1, "top_p": 0.95},
    "logprobs": {"temperature": 1.0, "top_k": 40, "logprobs": 3},
    "processed-logprobs": {"temperature": 1.0, "min_p": 0.01, "logprobs": 2, "logprobs_mode": "processed", "presence_penalty": 0.5},
    "prompt-logprobs": {"prompt_logprobs": 1, "logprobs": 0},
    "processor": {"temperature": 0.9, "processors": (lean_to_others,)},
    "grammar": {"temperature": 1.0, "grammar": Grammar.regex(r"( (the|cat|dog|red|blue|one|two|then)){1,9}")},
}  # what stops or bans a text is chosen from the text itself


@dataclass(frozen=True)
class Job:
    """A prompt with its sampling, and what plain decoding of each sample alone answers.

    Attributes:
        parent: index of the job whose whole text the prompt begins with; this one comes when that one has ended.
        beyond: the first sample's text without what stops it, as far as known: what drafters may draft.
    """

    name: str
    prompt: list[int]
    params: SamplingParams
    parent: int | None
    beyond: list[int]
    answers: list[RequestOutput]
    speculation: Mapping[str, object] = field(default_factory=dict)
    salt: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)


def known_of(jobs: Sequence[Job]) -> Answers:
    """The outputs of jobs that adversaries get."""
    return {(tuple(job.prompt), job.params.seed or 0): job.beyond for job in jobs}


class Solo:
    """A target decoded plainly: no drafter, no cached prompts, one request at a time."""

    def __init__(self, directory: Path, dtype: str) -> None:
        self.directory, self.dtype = directory, dtype
        self.config = read_model_config(directory)
        self._answers: dict[tuple[tuple[int, ...], SamplingParams], list[RequestOutput]] = {}
        self.llm = self.open(
            "none", num_blocks=3 * MAX_CONTEXT // BLOCK, enable_prefix_caching=False, block_bytes=_block_bytes(directory, dtype)
        )
        cache = self.llm.engine.cache
        self.block_bytes = _block_bytes(directory, dtype) if self.config.recurrent_layers else cache.num_bytes // cache.pool.num_blocks

    @property
    def vocab_size(self) -> int:
        return self.llm.vocab_size

    def samplings(self) -> list[str]:
        """Return the `SAMPLINGS` that the target supports: not every tokenizer supports grammars."""
        try:
            self.llm._input_processor.grammar_compiler.new_matcher(SAMPLINGS["grammar"]["grammar"], [1])
        except (BackendUnavailableError, RequestError):
            return [name for name in SAMPLINGS if name != "grammar"]
        return list(SAMPLINGS)

    def open(self, drafter: str | Drafter, *, num_blocks: int, block_bytes: int | None = None, **options: Any) -> LLM:
        """The target in an engine whose cache has `num_blocks` blocks."""
        given = {
            "dtype": self.dtype, "backend": "native", "threads": 1, "device": "cpu", "max_model_len": MAX_CONTEXT,
            "kv_cache_gb": (num_blocks + 0.5) * (block_bytes or self.block_bytes) / 1e9, **options,
        }  # fmt: skip
        with _planned(num_blocks) if self.config.recurrent_layers else nullcontext():
            return LLM(str(self.directory), drafter=drafter, **given)

    def answer(self, prompt: list[int], params: SamplingParams) -> list[RequestOutput]:
        """Each sample alone; computed once."""
        key = tuple(prompt), params
        if key not in self._answers:
            requests = self.llm._loaded.make_requests([prompt], params, {}, is_streamed=False)
            for request in requests:
                request.first_sample = None
                for _ in self.llm.engine.run([request]):
                    pass
            self._answers[key] = [self.llm._loaded.make_output(request) for request in requests]
        return self._answers[key]


@contextmanager
def _planned(num_blocks: int) -> Iterator[None]:
    """Caches opened within have so many blocks, and states for all texts: the sizes of both are no whole numbers of one another."""

    def plan(model: ModelConfig, config: EngineConfig, *args: Any) -> CachePlan:
        largest = plan_cache(model, replace(config, kv_cache_gb=1.0), *args)
        kept = replace(largest.checkpoints, max_checkpoints=100 if config.enable_prefix_caching else 0)
        return replace(largest, num_blocks=num_blocks, checkpoints=kept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_module, "plan_cache", plan)
        yield


def _block_bytes(directory: Path, dtype: str) -> int:
    config = read_model_config(directory)
    return config.kv_bytes_per_token(KVCacheDtype(config.weight_type.value if dtype == "auto" else dtype)) * BLOCK


class JobMaker:
    """Draws jobs whose prompts share beginnings, whole blocks of them or not, and go on where others ended."""

    def __init__(self, solo: Solo, random: np.random.Generator, *, max_tokens: int) -> None:
        self._solo, self._random, self._max_tokens = solo, random, max_tokens
        self._heads = [self._draw(BLOCK) for _ in range(2)]
        self._bodies = [self._draw(BLOCK) for _ in range(2)]  # after either prefix: the same tokens, but other rows

    def make(self, count: int) -> list[Job]:
        jobs: list[Job] = []
        names = self._solo.samplings() * (1 + count // (len(SAMPLINGS) - 1))
        self._random.shuffle(names)
        for number, name in enumerate(names[:count]):
            jobs.append(self._job(name, jobs, seed=1_000 + number))
        return jobs

    def _job(self, name: str, before: Sequence[Job], seed: int) -> Job:
        prompt, parent = self._prompt(before)
        room, left = MAX_CONTEXT - len(prompt), -len(prompt) % BLOCK
        max_tokens = int(self._random.integers(1, self._max_tokens + 1))
        if 0 < left <= self._max_tokens and self._random.random() < 0.5:  # prompt and output fill whole blocks
            max_tokens = left
        if name == "few-tokens":
            max_tokens = self._max_tokens
        if room < self._max_tokens:  # the end of the context comes first
            max_tokens = MAX_CONTEXT
        base = SamplingParams(**SAMPLINGS[name], seed=seed, max_tokens=max(max_tokens, 8) + BEYOND, ignore_eos=True)
        (beyond, *_) = self._solo.answer(prompt, base)
        params = self._finish(name, replace(base, max_tokens=max_tokens, min_tokens=min(base.min_tokens, max_tokens)), beyond)
        answers = self._solo.answer(prompt, params)
        controls: list[Mapping[str, object]] = [{}] * 7 + [{"enabled": False}, {"num_speculative_tokens": 1}, {"num_speculative_tokens": 3}]
        salt = "salt" if self._random.random() < 0.1 else None
        control = controls[int(self._random.integers(len(controls)))]
        return Job(name, prompt, params, parent, beyond.token_ids, answers, control, salt)

    def _finish(self, name: str, params: SamplingParams, beyond: RequestOutput) -> SamplingParams:
        """With what depends on the text."""
        random, ids, text = self._random, beyond.token_ids, beyond.text
        at = int(random.integers(0, min(len(ids), params.max_tokens)))
        if name == "bad-words":
            return replace(params, bad_words=[ids[at : at + 2], ids[: 1 + at % 3], [ids[-1]]])
        if name == "stop-string" and text:
            start = int(random.integers(0, max(1, len(text) * 2 // 3)))
            stops = [text[start : start + int(random.integers(1, 9))], text[-3:] + "never"]
            return replace(params, stop=stops, include_stop=bool(random.integers(2)))
        if name == "stop-id":
            return replace(params, stop_token_ids=[ids[at]], include_stop=bool(random.integers(2)))
        if name == "min-tokens":
            return replace(params, stop_token_ids=ids[:6], min_tokens=int(random.integers(0, params.max_tokens + 1)))
        if name == "eos":
            return replace(params, ignore_eos=False, logit_bias=dict.fromkeys(self._solo.llm._input_processor.eos_token_ids, 2.5))
        return replace(params, n=int(random.integers(2, 4))) if name == "samples" else params

    def _prompt(self, before: Sequence[Job]) -> tuple[list[int], int | None]:
        random = self._random
        kind = random.random()
        room = MAX_CONTEXT - self._max_tokens
        if kind < 0.25 and before:
            full = [index for index, job in enumerate(before) if (len(job.prompt) + len(job.answers[0].token_ids)) % BLOCK == 0]
            parent = int(random.choice(full if full and random.random() < 0.6 else len(before)))
            job = before[parent]
            talk = [*job.prompt, *job.answers[0].token_ids, *self._draw(int(random.integers(1, 12)))]
            if len(talk) < room:
                return talk, parent
        if kind < 0.35 and before:
            return before[int(random.integers(len(before)))].prompt, None
        if kind < 0.39:
            return self._draw(MAX_CONTEXT - int(random.integers(1, self._max_tokens))), None
        if kind < 0.47:  # a text that repeats itself
            piece = self._draw(int(random.integers(2, 9)))
            return (piece * 20)[: int(random.integers(10, 70))], None
        if kind < 0.8:
            blocks = [self._heads[random.integers(2)], self._bodies[random.integers(2)], self._bodies[random.integers(2)]]
            document = [token for block in blocks for token in block]
            prompt = [*document[: int(random.integers(20, len(document) + 1))], *self._draw(int(random.integers(1, 30)))]
            borders = len(prompt) // BLOCK * BLOCK
            return prompt[: borders - int(random.integers(0, 3))] if borders and random.random() < 0.6 else prompt, None
        return self._draw(int(random.choice([1, 2, 5, 31, 32, 33, 64, 65, 100]))), None

    def _draw(self, count: int) -> list[int]:
        return self._random.integers(1, self._solo.vocab_size, count).tolist()


# Drafters

TEXT_DRAFTERS = ["none", "ngram", "suffix", "suffix_tree", "prediction", "draft_model", "draft_tree", "several", "oracle", "wrong", "chaos"]
"""Those for any target."""
WIDE = ("draft_tree", "eagle", "eagle3", "mtp", "gemma4_assistant", "dflash", "dspark-rnn")
TREES = ("chaos", "suffix_tree", "several", "medusa", *WIDE)  # get rows for branches
HEADS = {"legible": ["eagle", "eagle3"], "mean": ["eagle"], "successor": ["medusa", "mtp"], "assisted": ["gemma4_assistant"]}
"""Targets with heads that know them."""


def make_drafter(kind: str, known: Answers, vocab_size: int, draft: Path, seed: int = 0) -> str | Drafter | list[Drafter]:
    """One by a name below, else by its own.

    Args:
        known: what plain decoding answers.
        draft: what drafters that are loaded are loaded from.
    """
    match kind:
        case "oracle":
            return OracleDrafter(known, accuracy=0.8, vocab_size=vocab_size, seed=seed)
        case "wrong":
            return WrongDrafter(known, vocab_size)
        case "chaos":
            return ChaosDrafter(known, vocab_size, seed=seed)
        case "suffix_tree":
            return SuffixDrafter(1, store=SuffixStore())
        case "several":
            adversaries = [ChaosDrafter(known, vocab_size, seed=seed), OracleDrafter(known, accuracy=0.5, vocab_size=vocab_size, seed=seed)]
            return [PredictionDrafter(), *adversaries, SuffixDrafter(1), NgramDrafter()]
        case _ if kind in ("draft_model", "medusa", *WIDE):
            return str(draft)
        case _:
            return kind


def open_drafting(kind: str, solo: "Solo", known: Answers, draft: Path, *, depth: int, seed: int = 0, **options: Any) -> LLM:
    """The target with a drafter that always drafts so many tokens deep."""
    width = 3 if kind in WIDE else 1
    drafter = make_drafter(kind, known, solo.vocab_size, draft, seed)
    llm = solo.open(drafter, num_speculative_tokens=depth, tree_width=width, **options)
    llm.engine.speculator.policy = FixedDraftLength(depth, max_rows=12 if kind in TREES else None)
    return llm


def write_heads_and_target(folder: Path, name: str) -> tuple[Path, dict[str, Path]]:
    """A target whose next token heads can predict, by kind, and these heads by kind."""
    from harness.eagle_checkpoints import write_legible_target, write_listening_eagle1, write_reading_eagle1, write_reading_eagle3
    from harness.gemma4_assistants import CLUSTERS, write_right_pair
    from harness.medusa_checkpoints import perfect_heads, write_heads, write_successor_target
    from harness.mtp_checkpoints import add_module, perfect_module

    target = folder / name
    if name == "assisted":
        target, assistant, _ = write_right_pair(target, **CLUSTERS)
        return target, {"gemma4_assistant": assistant}
    if name == "successor":
        _, successor = write_successor_target(target, "qwen3")
        add_module(target, "mtp", perfect_module(), num_layers=2)
        return target, {"medusa": write_heads(folder / "medusa", "rows", perfect_heads(successor)), "mtp": Path("mtp")}
    write_legible_target(target, reads_mean=name == "mean")
    if name == "mean":
        return target, {"eagle": write_listening_eagle1(folder / "listening")}
    return target, {"eagle": write_reading_eagle1(folder / "eagle"), "eagle3": write_reading_eagle3(folder / "eagle3")}

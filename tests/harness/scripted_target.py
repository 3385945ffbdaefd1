"""A target whose logits are written down instead of computed, the exact distribution of its text, and the test of counts against one."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.kv_cache.cache import CachedSequence
from paceline.sampling.draw import Distribution, draw
from paceline.sampling.grammars.matcher import GrammarMatcher
from paceline.sampling.noise import Purpose, exponential, key_bits, noise_key
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

Tokens = tuple[int, ...]
TextProbs = dict[Tokens, float]
NoisePosition = Callable[[int], int]  # index of a token in prompt + output -> position its noise is keyed by
LEAST_EXPECTED = 10.0  # cells with fewer expected counts are pooled


@dataclass(frozen=True)
class ScriptedTarget:
    """Peaked logits that depend on the whole context; small enough that every text of a few tokens can be enumerated."""

    vocab_size: int = 32
    prompt: Tokens = (3, 1, 4)
    spread: float = 2.0
    script: int = 0
    _rows: dict[Tokens, NDArray[np.float32]] = field(default_factory=dict, repr=False, compare=False)

    def logits(self, context_token_ids: Sequence[int]) -> NDArray[np.float32]:
        """[V] float32 logits of the token after `context_token_ids`; read-only, and the same for every call."""
        context = tuple(int(token_id) for token_id in context_token_ids)
        if context not in self._rows:
            row = np.random.default_rng([self.script, len(context), *context]).normal(0.0, self.spread, self.vocab_size)
            self._rows[context] = row.astype(np.float32)
            self._rows[context].flags.writeable = False
        return self._rows[context]

    def exact_joint_distribution(self, params: SamplingParams, num_tokens: int) -> TextProbs:
        """The probability of every possible text of `num_tokens` tokens, by enumeration with `textbook_probs`."""
        distribution: TextProbs = {(): 1.0}
        for _ in range(num_tokens):
            distribution = {
                (*text, token_id): mass * prob
                for text, mass in distribution.items()
                for token_id, prob in enumerate(textbook_probs(self.logits((*self.prompt, *text)), params, self.prompt, text))
                if prob > 0.0
            }
        return distribution

    def request(self, params: SamplingParams, seed: int, max_tokens: int = 100) -> Request:
        """A request for at most so many tokens after the prompt."""
        processor, length = LogitsProcessor(params, self.vocab_size, self.prompt), len(self.prompt)
        return Request(list(self.prompt), length, params, processor, CachedSequence(), seed, 0, max_len=length + max_tokens)

    def tree_logits(self, context: Sequence[int], tree: DraftTree) -> NDArray[np.float32]:
        """[N, V] rows of a tree drafted after a context."""
        return np.stack([self.logits((*context, *path)) for path in paths_of(tree)])

    def generate(
        self, params: SamplingParams, seed: int, num_tokens: int, sample_index: int = 0, grammar: GrammarMatcher | None = None
    ) -> Tokens:
        """Plain decoding, one token at a time, as the engine does it."""
        processor = LogitsProcessor(params, self.vocab_size, self.prompt, grammar=grammar)
        text: list[int] = []
        for _ in range(num_tokens):
            context = (*self.prompt, *text)
            token_id = draw(processor.process(self.logits(context)), seed, sample_index, len(context))
            processor.commit(token_id)
            text.append(token_id)
        return tuple(text)

    def generate_many(
        self, params: SamplingParams, seeds: NDArray[np.uint64], num_tokens: int, noise_position: NoisePosition = int
    ) -> NDArray[np.int64]:
        """[len(seeds), num_tokens]: `generate` for many seeds, the processors run once for those that share a text so far.

        `noise_position` exists to break the noise on purpose; the identity is the engine's.
        """
        texts = np.zeros((len(seeds), num_tokens), np.int64)
        for depth in range(num_tokens):
            position = noise_position(len(self.prompt) + depth)
            for text, members in _groups(texts[:, :depth]):
                processor = LogitsProcessor(params, self.vocab_size, self.prompt)
                row = processor.process(self.logits((*self.prompt, *text)), text)
                texts[members, depth] = draw_many(row, seeds[members], 0, position)
        return texts


def paths_of(tree: DraftTree) -> list[Tokens]:
    """The drafted tokens from the root to each node."""
    paths: list[Tokens] = [()]
    for token, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


def textbook_probs(
    logits: NDArray[np.float32], params: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> NDArray[np.float64]:
    """[V] float64 probabilities of the next token, in the plainest way: every processor by its definition, by full sorts.

    Without EOS ids: of min_tokens only the ban of `stop_token_ids` is here. Without a tokenizer: bad words are token sequences.
    """
    scores = [float(value) for value in logits]
    for token_id, bias in params.logit_bias.items():
        scores[token_id] += bias
    for token_id in {*prompt, *output}:
        scores[token_id] *= params.repetition_penalty if scores[token_id] < 0 else 1.0 / params.repetition_penalty
    for token_id in set(output):
        scores[token_id] -= params.presence_penalty + params.frequency_penalty * list(output).count(token_id)
    text = [*prompt, *output]
    for token_id in {*params.banned_token_ids, *(params.stop_token_ids if len(output) < params.min_tokens else ())}:
        scores[token_id] = -math.inf
    for token_id in range(len(scores)):
        longer = [*text, token_id]
        if _repeats_its_last(longer, params.no_repeat_ngram_size) or any(_ends_with(longer, word) for word in params.bad_words):
            scores[token_id] = -math.inf
    for processor in params.processors:
        scores = [float(score) for score in processor(text, np.array(scores, np.float32))]
    ranked = sorted(range(len(scores)), key=lambda token_id: (-scores[token_id], token_id))
    if params.is_greedy:
        return np.eye(len(scores))[ranked[0]]
    peak = scores[ranked[0]]
    weights = {token_id: math.exp((scores[token_id] - peak) / params.temperature) for token_id in ranked}
    if params.top_k:
        least = scores[ranked[min(params.top_k, len(ranked)) - 1]]
        ranked = [token_id for token_id in ranked if scores[token_id] >= least]
    total = math.fsum(weights[token_id] for token_id in ranked)
    kept = [
        token_id
        for rank, token_id in enumerate(ranked)
        if (params.top_p == 1.0 or math.fsum(weights[better] for better in ranked[:rank]) < params.top_p * total)
        and weights[token_id] >= params.min_p
    ]
    probs = np.zeros(len(scores))
    probs[kept] = [weights[token_id] for token_id in kept]
    return probs / probs.sum()


def _ends_with(text: Sequence[int], end: Sequence[int]) -> bool:
    return tuple(text[max(0, len(text) - len(end)) :]) == tuple(end)


def _repeats_its_last(text: Sequence[int], size: int) -> bool:
    """Whether the last `size` tokens also occur earlier."""
    starts = range(len(text) - size) if size else ()
    return any(text[start : start + size] == text[len(text) - size :] for start in starts)


def draw_many(row: Distribution, seeds: NDArray[np.uint64], sample_index: int, position: int) -> NDArray[np.int64]:
    """[len(seeds)] tokens of a short row, one position drawn for many seeds at once; some of them are compared with `draw`."""
    samples, positions = np.full(len(seeds), sample_index, np.uint64), np.full(len(seeds), position, np.uint64)
    keys = noise_key(seeds, samples, positions, Purpose.TOKEN)
    ids = np.arange(len(row.scores)) if row.token_ids is None else row.token_ids
    tokens = ids[np.argmax(row.scores - np.log(exponential(key_bits(keys[:, None], ids))), axis=1)]
    assert tokens[:20].tolist() == [draw(row, seed, sample_index, position) for seed in seeds[:20].tolist()]
    return tokens


def joint_counts(texts: NDArray[np.int64]) -> dict[Tokens, int]:
    """How often each row of `texts` occurs."""
    distinct, counts = np.unique(texts, axis=0, return_counts=True)
    return {tuple(text.tolist()): int(count) for text, count in zip(distinct, counts, strict=True)}


def chi_square_p_value(observed: Mapping[Hashable, int], distribution: Mapping[Hashable, float]) -> float:
    """Pearson's chi-square test that `observed` was drawn from `distribution`; cells expected fewer than 10 times are pooled.

    An outcome the distribution excludes makes the p-value 0.
    """
    if any(distribution.get(cell, 0.0) == 0.0 for cell in observed):
        return 0.0
    num_draws = sum(observed.values())
    statistic, num_cells = 0.0, 0
    rare_observed, rare_expected = 0.0, 0.0
    for cell, prob in distribution.items():
        expected = prob * num_draws
        if expected < LEAST_EXPECTED:
            rare_observed += observed.get(cell, 0)
            rare_expected += expected
        else:
            statistic += (observed.get(cell, 0) - expected) ** 2 / expected
            num_cells += 1
    if rare_expected >= LEAST_EXPECTED:
        statistic += (rare_observed - rare_expected) ** 2 / rare_expected
        num_cells += 1
    return chi_square_tail(statistic, num_cells - 1)


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(X >= statistic) of a chi-square variable.

    Source: the recursion Q(a + 1, y) = Q(a, y) + y**a e**-y / Gamma(a + 1) of the regularised incomplete gamma function,
    from Q(1, y) = e**-y or Q(1/2, y) = erfc(sqrt(y)); all its terms are positive.
    """
    half = statistic / 2.0
    if half <= 0.0:
        return 1.0
    shape = 0.5 if degrees % 2 else 1.0
    tail = math.erfc(math.sqrt(half)) if degrees % 2 else math.exp(-half)
    while shape < degrees / 2.0:
        tail += math.exp(shape * math.log(half) - half - math.lgamma(shape + 1.0))
        shape += 1.0
    return min(tail, 1.0)


def _groups(texts: NDArray[np.int64]) -> list[tuple[Tokens, NDArray[np.int64]]]:
    """The distinct rows, each with the indices where it occurs."""
    if texts.shape[1] == 0:
        return [((), np.arange(len(texts)))]
    distinct, group_of = np.unique(texts, axis=0, return_inverse=True)
    order = np.argsort(group_of.reshape(-1), kind="stable")
    ends = np.cumsum(np.bincount(group_of.reshape(-1)))
    return [(tuple(text.tolist()), members) for text, members in zip(distinct, np.split(order, ends[:-1]), strict=True)]

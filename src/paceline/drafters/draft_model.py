"""Drafts with a small language model, the draft model.

Each draft token costs one pass of the draft model. The first pass of a step also runs the tokens that were committed since the last draft.
Trees cost no more passes: the siblings of a chain's token come from the same row of logits as the token. `DraftSampler` samples the tokens.
For rejection sampling, tokens are drawn with noise that the target does not use, and the tree contains their distributions.

A PARD draft model (arXiv:2504.18583) was trained with a mask token: one pass over the new tokens and k - 1 mask tokens gives the logits of
all k draft tokens. The cache rows of the mask tokens are not kept.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice, repeat
from pathlib import Path
from time import perf_counter
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from paceline.config import cache_directory
from paceline.drafters.draft_sampler import NO_TOKENS, DraftSampler, DraftTokens, target_noise_sampling
from paceline.drafters.target import LoadedTarget
from paceline.drafters.translate import ByteTokenizer, GreedyTextModel, SharedVocabularyMap, TextDrafter
from paceline.errors import CapacityError, CheckpointError, IncompatibleDrafterError, RequestError
from paceline.kv_cache.cache import BLOCK_SIZE, CachedSequence, KVCache
from paceline.kv_cache.recurrent_state import CheckpointConfig
from paceline.kv_cache.row_plan import RowPlan, num_blocks_for
from paceline.models.checkpoint import read_model_config
from paceline.models.config import ModelConfig
from paceline.models.tensor_names import num_parameters
from paceline.runtimes.base import FloatArray, LogitsRows, Network, Numerics, assemble_pass, split_into_passes
from paceline.runtimes.cost import time_passes
from paceline.runtimes.load import RuntimeOptions, load_network
from paceline.runtimes.logits_summary import LogitsSummary
from paceline.sampling.residual import TokenProbs, draw_distinct
from paceline.small_files import read_json
from paceline.speculation.drafter import FREE_PREFILL_TOKENS, DraftBudget, Drafter, DrafterTraits, PrefillTime, RequestState
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree
from paceline.speculation.tree_growth import Candidate, grow_tree_stepwise
from paceline.tokenizer.tokenizer import Tokenizer
from paceline.tokenizer.vocabulary import SAMPLE_TEXT, VocabularyComparison, VocabularyMatch, compare_vocabularies

PREFILL_CHUNK_TOKENS = 256  # maximum number of a request's tokens in one prefill pass of the draft model
_PREFILL_PROFILE_TOKENS = 32  # number of tokens of the pass that measures the prefill speed

ResultT = TypeVar("ResultT")
TokenPath: TypeAlias = Sequence[int]
"""Draft tokens on the path from the root of the tree to a node; the root, which is committed, is excluded."""


class DraftLogits(NamedTuple):
    """The draft model's logits [V] after a path, and their top tokens if these are enough to sample from."""

    logits: FloatArray
    top_tokens: LogitsSummary | None = None


DraftGenerator: TypeAlias = Generator[TokenPath, DraftLogits | None, ResultT]
"""Generator that drafts token by token. It yields the path after which it needs logits: first (), then the previous path plus one token. It
receives these logits, or None if the cache is full, and returns the finished draft."""


@dataclass(slots=True)
class _CachedSequenceState:
    """The part of a request's text that is in the draft model's cache."""

    sequence: CachedSequence
    token_ids: list[int] = field(default_factory=list)  # the cached tokens, as ids of the draft model
    num_verified: int = 0  # how many of the first cached tokens are known to be equal to the request's committed text
    num_tokens_at_last_draft: int = 0  # length of the request at its last draft; before its first draft, the length of its cached prefix
    start: int = 0  # index in the request's text of the first cached token; above 0 if the text is longer than the draft model's context


@dataclass(slots=True)
class _Draft(Generic[ResultT]):
    """One request's draft in progress."""

    request: Request
    state: _CachedSequenceState
    generator: DraftGenerator[ResultT]  # the generator that drafts
    pending_token_ids: list[int]  # tokens to run in the next pass; empty once the draft is finished
    depth: int  # maximum number of draft tokens on a path
    uses_top_tokens: bool = False  # the top tokens that a pass returns are enough to sample from; otherwise whole rows of logits are used
    num_received_logit_rows: int = 0  # number of rows of logits that were sent to `generator` so far
    result: ResultT | None = None  # the finished draft


class DraftModelDrafter(GreedyTextModel):
    """Drafts with a language model that has the target's token ids, or whose ids can be mapped to them.

    Args:
        runtime, cache: network and KV cache of the draft model; only this drafter uses them.
        vocab_size: V of the target; ids >= V are never drafted.
        num_tokenizer_ids: number of ids of the draft model's tokenizer; larger ids are padding and are never drafted.
        translation: map between the vocabularies of target and draft model; None = their ids are equal.
        max_model_len: longest text that the draft model can run, in its own tokens; None = the maximum of its config.
        tree_width: number of draft tokens at each position; 1 = a chain, else the chain's token and its most probable siblings.
        description_suffix: end of the drafter's description, such as "; with the adapter NAME".
        notices: messages for the user, shown at load.
        prefill_token_s: seconds to prefill one token of a long text; 0 = not measured yet.
        mask_token_id: mask token of a PARD model, which drafts all tokens in one pass; None = each pass drafts one token.
    """

    name = "draft_model"

    def __init__(
        self,
        runtime: Network,
        cache: KVCache,
        *,
        vocab_size: int,
        num_tokenizer_ids: int | None = None,
        translation: SharedVocabularyMap | None = None,
        max_model_len: int | None = None,
        tree_width: int = 1,
        description_suffix: str = "",
        notices: Sequence[str] = (),
        prefill_token_s: float = 0.0,
        mask_token_id: int | None = None,
    ) -> None:
        self.runtime, self.cache, self._mask_token_id = runtime, cache, mask_token_id
        self._num_tokenizer_ids = runtime.config.vocab_size if num_tokenizer_ids is None else num_tokenizer_ids
        self._translation = translation
        self.max_model_len = runtime.config.max_positions if max_model_len is None else max_model_len
        self._max_depth = self.max_model_len // 2
        self._tree_width = tree_width
        self.traits = DrafterTraits(
            _description(runtime, tree_width, description_suffix, is_pard=mask_token_id is not None),
            notices,
            cache_bytes_per_token=cache.bytes_per_token,
        )
        self._states = RequestState[_CachedSequenceState]()
        self._prefill_time = PrefillTime(prefill_token_s)
        self._sampler = DraftSampler(None, vocab_size, self._num_tokenizer_ids)
        self._summary_options = self._sampler.summary_options(tree_width)
        self._truncated_summary_options = self._sampler.truncated_summary_options(tree_width)

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        drafts: list[_Draft[DraftTree | None] | None] = []
        for request, budget in zip(requests, budgets, strict=True):
            context = request.token_ids if self._translation is None else self._translation.draft_context(request)
            budget = replace(budget, max_depth=min(budget.max_depth, budget.max_rows - 1, self._max_depth))
            is_drawn = budget.needs_draft_probs and not request.params.is_greedy
            generator = (self._rejection_sampling_generator if is_drawn else self._tree_generator)(request, budget)
            draft = self._start_draft(request, context, len(context), budget.max_depth, generator)
            if draft is not None:
                draft.uses_top_tokens = self._translation is None and request.processor.needs_no_editing and not is_drawn
            drafts.append(draft)
        self._run_until_finished(requests, drafts)
        return [None if draft is None else draft.result for draft in drafts]

    def generate(
        self, requests: Sequence[Request], contexts: Sequence[tuple[Sequence[int], int]], max_new_tokens: Sequence[int]
    ) -> list[list[int]]:
        drafts: list[_Draft[list[int]] | None] = []
        for request, (context, num_unchanged_tokens), count in zip(requests, contexts, max_new_tokens, strict=True):
            depth = min(count, self._max_depth)
            drafts.append(self._start_draft(request, context, num_unchanged_tokens, depth, self._greedy_generator(depth)))
        self._run_until_finished(requests, drafts)
        return [draft.result or [] if draft is not None else [] for draft in drafts]

    def prefill_s(self, request: Request) -> float:
        state, length = self._get_or_create_state(request), len(request.token_ids)
        if length - state.start >= self.max_model_len:  # too long for the draft model: the next draft runs only the end of the text
            return self._prefill_time.expected_s(self.max_model_len // 2)
        return self._prefill_time.expected_s(length - state.num_tokens_at_last_draft)

    def release(self, request: Request) -> None:
        state = self._states.pop(request)
        if state is not None:
            self.cache.release_sequence(state.sequence)

    def _start_draft(
        self, request: Request, context: Sequence[int], num_unchanged_tokens: int, depth: int, generator: DraftGenerator[ResultT]
    ) -> _Draft[ResultT] | None:
        """Prepare the cache for a draft of `depth` tokens after `context`, and start its `generator`; None if nothing can be drafted."""
        if depth < 1 or not context:
            return None
        state = self._get_or_create_state(request)
        if not 0 <= state.start < len(context) or len(context) - state.start + depth > self.max_model_len:
            self._reset_cache(state, request, max(0, len(context) + depth - self.max_model_len), depth)
        context, num_unchanged_tokens = context[state.start :], max(0, num_unchanged_tokens - state.start)
        if not state.token_ids:  # a new request may reuse rows of the prefix cache
            state.num_verified = self.cache.match_prefix(state.sequence, context)
            state.token_ids.extend(context[: state.num_verified])
        state.num_tokens_at_last_draft = len(request.token_ids)
        self._truncate_rejected(state, context, num_unchanged_tokens)
        self.cache.register_prefix(state.sequence, state.token_ids)
        pending = list(context[len(state.token_ids) :])
        if max(pending) >= self.runtime.config.vocab_size:  # the draft model has no embedding for a token of the text
            return None
        next(generator)  # run the generator until it waits for the logits after the last committed token
        return _Draft(request, state, generator, pending, depth)

    def _get_or_create_state(self, request: Request) -> _CachedSequenceState:
        """Return the record of a request's cached tokens; create it for a new request, with the length of its cached prefix."""
        state = self._states.get(request)
        if state is None:
            state = self._states[request] = _CachedSequenceState(self.cache.new_sequence(request.cached_sequence.salt))
            if self._translation is None:
                state.num_tokens_at_last_draft = self.cache.cached_prefix_len(state.sequence, request.token_ids)
        return state

    def _reset_cache(self, state: _CachedSequenceState, request: Request, num_excess_tokens: int, depth: int) -> None:
        """Drop the request's cached tokens. If its text is `num_excess_tokens` too long, passes run only its end, half a context length."""
        self.cache.release_sequence(state.sequence)
        state.sequence = self.cache.new_sequence(request.cached_sequence.salt)
        state.token_ids.clear()
        state.num_verified = 0
        state.start = num_excess_tokens + (self.max_model_len - depth) // 2 if num_excess_tokens else 0

    def _truncate_rejected(self, state: _CachedSequenceState, token_ids: Sequence[int], num_unchanged_tokens: int) -> None:
        """Drop cached draft tokens that the target rejected, and the last committed token: it must run again to give logits.

        The first `num_unchanged_tokens` of `token_ids` are the same as at the last draft.
        """
        num_matching = min(state.num_verified, num_unchanged_tokens)
        limit = min(len(state.token_ids), len(token_ids) - 1)
        while num_matching < limit and state.token_ids[num_matching] == token_ids[num_matching]:
            num_matching += 1
        state.num_verified = self.cache.truncate(state.sequence, min(num_matching, limit))
        del state.token_ids[state.num_verified :]

    def _run_until_finished(self, requests: Sequence[Request], drafts: Sequence[_Draft[ResultT] | None]) -> None:
        """Run passes of the draft model until every draft is finished."""
        active = [draft for draft in drafts if draft is not None]
        try:
            self._prefill_long_texts(active)
            while active := [draft for draft in active if draft.pending_token_ids]:
                for part in split_into_passes(active, lambda draft: len(draft.pending_token_ids) + self._num_mask_tokens(draft)):
                    ran, logits_by_draft = self._run_pass(part, [draft.pending_token_ids for draft in part], needs_logits=True)
                    for draft, rows in zip(ran, logits_by_draft, strict=True):
                        for row in rows:
                            if draft.pending_token_ids:
                                self._advance_generator(draft, row)
                        if draft.pending_token_ids and self._mask_token_id is not None:
                            self._advance_generator(draft, None)
        except BaseException:
            for request in requests:  # an interrupted pass may have left cache rows unwritten: none of these requests' rows can be used
                self.release(request)
            raise

    def _prefill_long_texts(self, drafts: Sequence[_Draft[ResultT]]) -> None:
        """Prefill long texts in chunks, except the last chunk, which the pass of the first draft token runs."""
        while long_drafts := [draft for draft in drafts if len(draft.pending_token_ids) > PREFILL_CHUNK_TOKENS]:
            for part in split_into_passes(long_drafts, lambda _: PREFILL_CHUNK_TOKENS):
                ran, _ = self._run_pass(part, [draft.pending_token_ids[:PREFILL_CHUNK_TOKENS] for draft in part], needs_logits=False)
                for draft in ran:
                    del draft.pending_token_ids[:PREFILL_CHUNK_TOKENS]
                    draft.state.num_verified = len(draft.state.token_ids)  # prefilled tokens are committed

    def _num_mask_tokens(self, draft: _Draft[ResultT]) -> int:
        return 0 if self._mask_token_id is None else draft.depth - 1

    def _advance_generator(self, draft: _Draft[ResultT], row: DraftLogits | None) -> None:
        """Send the logits `row` to a draft's generator, which yields the next token to run. If `row` is None, the draft ends."""
        draft.num_received_logit_rows += 1
        try:
            token = draft.generator.send(row)[-1]
            draft.pending_token_ids = [token if self._translation is None else self._translation.to_draft_id(token)]
        except StopIteration as end:
            draft.pending_token_ids, draft.result = [], end.value

    def _greedy_generator(self, depth: int) -> DraftGenerator[list[int]]:
        """Draft up to `depth` tokens, each the most probable one."""
        path: list[int] = []
        while len(path) < depth and (row := (yield path)) is not None:
            path.append(int(np.argmax(row.logits[: self._num_tokenizer_ids])))
        return path

    def _tree_generator(self, request: Request, budget: DraftBudget) -> DraftGenerator[DraftTree | None]:
        """Draft a chain and siblings of its tokens: those most likely to be accepted, as many as the budget has rows.

        The chain ends early if no token is allowed, or if the probability of its path falls below `min_path_prob`.
        """
        root: TokenPath | None = ()
        growth, path_prob = grow_tree_stepwise(request.token_ids[-1], budget, root, self.name), 1.0
        try:
            path = next(growth)
            while True:
                is_expanded = path is not None and path_prob >= budget.min_path_prob
                candidates = self._sample_candidates(request, (yield path), path) if path is not None and is_expanded else []
                path_prob *= budget.acceptance_rate(candidates[0][1]) if candidates else 1.0
                path = growth.send(candidates)
        except StopIteration as end:
            tree: DraftTree | None = end.value
            return tree

    def _rejection_sampling_generator(self, request: Request, budget: DraftBudget) -> DraftGenerator[DraftTree | None]:
        """Draft for rejection sampling: draw tokens from the draft model's distributions, and keep the distributions."""
        token_ids: list[int] = []
        parents: list[int] = []
        draft_probs: dict[int, TokenProbs] = {}
        path, node = list[int](), 0
        key = request.seed, request.sample_index, len(request.token_ids)
        # the number of tokens of a level must not depend on drawn tokens: that would change the output's distribution
        for count in _tokens_per_level(self._tree_width, budget.max_depth, budget.max_rows):
            row = yield path
            if row is None:
                break
            try:
                draft_probs[node] = TokenProbs.from_distribution(request.processor.process(self._to_target_logits(row.logits), path))
            except RequestError:  # the request's constraints allow no token
                break
            tokens = draw_distinct(draft_probs[node], count, *key, len(path))
            parents += [node] * len(tokens)
            node = len(token_ids) + 1
            token_ids += tokens
            path.append(tokens[0])
        return DraftTree.from_nodes(request.token_ids[-1], token_ids, parents, self.name, draft_probs) if token_ids else None

    def _sample(self, request: Request, row: DraftLogits | None, path: TokenPath, width: int) -> DraftTokens:
        """Sample up to `width` draft tokens from the logits after a path; none if `row` is None."""
        if row is None:
            return NO_TOKENS
        summary = row.top_tokens
        if summary is not None and math.isfinite(summary.log_sum_exp):
            if not request.params.has_truncation:
                return self._sampler.sample_from_top_tokens(summary, width, is_greedy=request.params.is_greedy)
            drafted = self._sampler.sample_from_truncated_top_tokens(request, path, summary, width)
            if drafted is not None:
                return drafted
        try:
            return self._sampler.sample_target_row(request, path, self._to_target_logits(row.logits), width, needs_draft_probs=False)
        except RequestError:  # the request's constraints allow no token
            return NO_TOKENS

    def _sample_candidates(self, request: Request, row: DraftLogits | None, path: TokenPath) -> list[Candidate[TokenPath | None]]:
        """Sample the tokens after a path as candidates for the tree. Only the first gets children: the tree is a chain with siblings."""
        drafted = self._sample(request, row, path, self._tree_width)
        return [
            (token, prob, None if rank else (*path, token))
            for rank, (token, prob) in enumerate(zip(drafted.token_ids, drafted.probs, strict=True))
        ]

    def _to_target_logits(self, row: FloatArray) -> FloatArray:
        """Convert the draft model's logits to a row [V] of the target's ids; ids that cannot be drafted get -inf."""
        return (self._sampler if self._translation is None else self._translation).to_target_logits(row)

    def _run_pass(
        self, drafts: Sequence[_Draft[ResultT]], token_ids: Sequence[list[int]], *, needs_logits: bool
    ) -> tuple[list[_Draft[ResultT]], list[list[DraftLogits]]]:
        """Run one pass of the draft model. A draft ends if the cache has no free block for it.

        Returns:
            the drafts that ran, and for each the logits of its next token; for PARD models also those of the tokens after it.
        """
        ran, plans, rows, logit_indices = list[_Draft[ResultT]](), list[RowPlan](), list[list[int]](), list[range]()
        for draft, ids in zip(drafts, token_ids, strict=True):
            masks = [self._mask_token_id] * self._num_mask_tokens(draft) if needs_logits and self._mask_token_id is not None else []
            try:
                # the last row may be dropped and run again (`_truncate_rejected`); the rows before it are committed text
                num_known = len(ids) - needs_logits if len(ids) > 1 else 1
                state, num_rows = draft.state, len(ids) + len(masks)
                plans.append(self.cache.reserve_rows(state.sequence, range(-1, num_rows - 1), num_known, pinned_len=state.num_verified))
            except CapacityError:
                self._advance_generator(draft, None)
                self.release(draft.request)
                continue
            ran.append(draft)
            rows.append([*ids, *masks])
            logit_indices.append(range(len(ids) - 1, num_rows) if needs_logits else range(0))
        if not ran:
            return ran, []
        start = perf_counter()
        inputs, batch, logits_rows = assemble_pass(plans, rows, logit_indices)
        has_summaries = needs_logits and any(draft.uses_top_tokens for draft in ran)
        if has_summaries:
            logits_rows = self._with_top_tokens(logits_rows, ran, [len(indices) for indices in logit_indices])
        output = self.runtime.forward(inputs, batch, logits_rows)
        num_rows = sum(map(len, rows))
        if num_rows > FREE_PREFILL_TOKENS * len(rows):
            self._prefill_time.observe(num_rows, perf_counter() - start)
        for draft, ids, indices in zip(ran, rows, logit_indices, strict=True):
            num_kept = indices[0] + 1 if indices else len(ids)
            self.cache.keep_path(draft.state.sequence, num_kept - 1)
            draft.state.token_ids.extend(ids[:num_kept])
        if not needs_logits:
            return ran, []
        row_logits = zip(output.logits, output.summaries if has_summaries else repeat(None), strict=False)
        return ran, [
            [DraftLogits(logits, top_tokens if draft.uses_top_tokens else None) for logits, top_tokens in islice(row_logits, len(indices))]
            for draft, indices in zip(ran, logit_indices, strict=True)
        ]

    def _with_top_tokens(self, logits_rows: LogitsRows, drafts: Sequence[_Draft[ResultT]], num_rows: Sequence[int]) -> LogitsRows:
        """Add the options for returning top tokens and drawn tokens to `logits_rows`; `num_rows`: rows of logits of each draft."""
        drawn = [
            (draft.request, draft.num_received_logit_rows + index) if draft.uses_top_tokens and not draft.request.params.is_greedy else None
            for draft, count in zip(drafts, num_rows, strict=True)
            for index in range(count)
        ]
        truncates = any(draft.uses_top_tokens and draft.request.params.has_truncation for draft in drafts)
        summary = self._truncated_summary_options if truncates else self._summary_options
        return logits_rows._replace(summary=summary, sampling=target_noise_sampling(drawn))


def _description(runtime: Network, tree_width: int, description_suffix: str, *, is_pard: bool) -> str:
    num_layers = runtime.config.num_layers
    layers = f"{num_layers} layer{'s' if num_layers > 1 else ''}"
    shape = "" if tree_width == 1 else f", {tree_width} tokens a position"
    shape += ", PARD: all tokens in one pass" if is_pard else ""
    return f"draft_model ({layers}, hidden size {runtime.config.hidden_size}{shape}{description_suffix})"


@lru_cache(maxsize=256)
def _tokens_per_level(width: int, depth: int, max_rows: int) -> tuple[int, ...]:
    """Return the number of tokens of each level of a tree: a chain token and up to `width` - 1 siblings, `max_rows` rows in all."""
    parents = [1 + (level - 1) * width if level else 0 for level in range(depth) for _ in range(width)]
    tree = DraftTree.from_nodes(0, [*range(width)] * depth, parents, "").trim(vocab_size=width, max_depth=depth, max_rows=max_rows)
    return tuple(tree.depths.count(level) for level in range(1, tree.tree_depth + 1))


def open_draft_model(directory: Path, target: LoadedTarget) -> Drafter:
    """Load a draft model and create its drafter. If too few token ids can be mapped to the target's, it drafts text.

    Raises:
        IncompatibleDrafterError: the tokenizers differ so much that the draft model cannot draft for the target.
        CheckpointError: files of the draft model are damaged or incomplete.
    """
    config = read_model_config(directory)
    tokenizer = Tokenizer.open(directory)
    comparison = compare_vocabularies(target.tokenizer, tokenizer)
    if comparison.is_unusable:
        raise IncompatibleDrafterError(
            f"draft model {directory} cannot draft for {target.directory}: {comparison.why_unusable()}. "
            "Use a draft model of the same family (same tokenizer), or drafter='suffix'"
        )
    has_all_ids = comparison.is_compatible and comparison.same_id_share == 1.0
    token_ratio = 1.0 if has_all_ids else _token_ratio(target.tokenizer, tokenizer)
    required_len = math.ceil(target.max_model_len * token_ratio)
    max_model_len = min(required_len, config.max_positions)
    mask_token_id = read_mask_token(directory, config)
    runtime, cache = _load_runtime(directory, target, max_model_len, token_ratio)
    passes = time_passes(runtime, cache, (_PREFILL_PROFILE_TOKENS,), max_model_len=max_model_len, num_rounds=1, with_logits=False)
    translation, tokenizers = None, None if has_all_ids else (ByteTokenizer(target.tokenizer), ByteTokenizer(tokenizer))
    if tokenizers is not None and comparison.match is not VocabularyMatch.DISJOINT:
        translation = SharedVocabularyMap(*tokenizers, vocab_size=target.vocab_size, draft_vocab_size=runtime.config.vocab_size)
    drafter = DraftModelDrafter(
        runtime,
        cache,
        vocab_size=target.vocab_size,
        num_tokenizer_ids=min(tokenizer.vocab_size, runtime.config.vocab_size),
        translation=translation,
        max_model_len=max_model_len,
        tree_width=target.speculation.tree_width,
        notices=[line for line in [too_large_reason(directory, config, target.runtime.config)] if line],
        description_suffix=_describe_compatibility(comparison, max_model_len, required_len, target.speculation.draft_adapter),
        prefill_token_s=passes[_PREFILL_PROFILE_TOKENS] / _PREFILL_PROFILE_TOKENS,
        mask_token_id=mask_token_id,
    )
    return drafter if tokenizers is None or translation is not None else TextDrafter(drafter, *tokenizers)


def too_large_reason(directory: Path, draft: ModelConfig, target: ModelConfig) -> str:
    """Return an error text if a draft model is at least as large as its target and drafts one token a pass; "" otherwise."""
    size, target_size = num_parameters(draft), num_parameters(target)
    if size < target_size or read_mask_token(directory, draft) is not None:
        return ""
    return (
        f"the draft model has {size:,} parameters, the target {target_size:,}: a draft pass costs as much as a plain step, so drafting "
        "cannot be faster"
    )


def read_mask_token(directory: Path, config: ModelConfig) -> int | None:
    """Return the mask token of a PARD draft model; None for other language models.

    Raises:
        CheckpointError: the mask token is not an id of the model.
    """
    path = directory / "config.json"
    values = read_json(path) if path.is_file() else {}
    if not isinstance(values, dict) or "pard_token" not in values:
        return None
    token = values["pard_token"]
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < config.vocab_size:
        raise CheckpointError(f"{path}: pard_token = {token!r}, expected an id below {config.vocab_size}; download it again")
    return token


def _load_runtime(directory: Path, target: LoadedTarget, max_model_len: int, token_ratio: float) -> tuple[Network, KVCache]:
    """Load the draft model, and allocate a KV cache for the texts that fit the target's cache. `token_ratio`: see `_token_ratio`."""
    adapter = None if target.speculation.draft_adapter is None else Path(target.speculation.draft_adapter)
    options = RuntimeOptions(
        numerics=Numerics.FAST,
        num_threads=target.engine.num_threads,
        max_model_len=max_model_len,
        device=target.engine.device,
        quantization=target.draft_quant,
        cache_directory=cache_directory(),
        memory_bytes=None if adapter is None else target.memory_bytes,
        merge_adapter=adapter,
    )
    runtime = load_network(directory, options).network
    num_blocks = 1 + num_blocks_for(math.ceil(target.cache.max_slots * token_ratio), BLOCK_SIZE)  # 1 block to measure the prefill speed
    max_checkpoints = target.engine.max_num_seqs if target.cache.prefix_caching else 0
    cache = runtime.new_cache(
        num_blocks, checkpoints=CheckpointConfig(interval_rows=target.engine.state_interval, max_checkpoints=max_checkpoints)
    )
    cache.prefix_caching = target.cache.prefix_caching
    return runtime, cache


def _token_ratio(target: Tokenizer, draft: Tokenizer) -> float:
    """Estimate the draft model's tokens per target token of the same text, plus 25 % for safety; at least 1."""
    counts = [len(tokenizer.encode(SAMPLE_TEXT, add_special_tokens=False)) for tokenizer in (draft, target)]
    return max(1.0, 1.25 * counts[0] / max(1, counts[1]))


def _describe_compatibility(comparison: VocabularyComparison, max_model_len: int, required_len: int, adapter: str | None) -> str:
    """Describe for the user the LoRA `adapter`, if any, and a vocabulary or a context length that differs from the target's."""
    description = "" if adapter is None else f"; with the adapter {Path(adapter).name or adapter}"
    if comparison.same_id_share != 1.0:
        description += f"; {comparison.match.value} vocabularies: {comparison.describe_token_conversion()}"
    if max_model_len < required_len:
        description += f"; drafts from the last tokens of texts longer than its context of {max_model_len}"
    return description

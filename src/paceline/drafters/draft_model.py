"""Drafter of a small language model.

A step costs one draft pass per draft token; the first pass also catches up on the tokens committed since the last draft. A tree adds
siblings to the chain, from rows that the chain computes anyway. Tokens are sampled as `DraftSampler` describes. For rejection sampling,
drafts are drawn with separate noise, and the tree holds the distributions that they were drawn from.

A PARD draft model (arXiv:2504.18583) was trained with a mask token: one pass over the new tokens and k - 1 mask tokens gives the rows of
all k draft tokens. The mask tokens' rows are dropped from its cache.
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from paceline.config import cache_directory
from paceline.drafters.draft_sampler import NO_TOKENS, DraftSampler, DraftTokens, token_draws
from paceline.drafters.target import LoadedTarget
from paceline.drafters.translate import ByteTokenizer, SharedPieces, TextDrafter
from paceline.errors import CapacityError, CheckpointError, IncompatibleDrafterError, RequestError
from paceline.kv_cache.cache import BLOCK_SIZE, CachedSequence, KVCache
from paceline.kv_cache.recurrent_state import CheckpointConfig
from paceline.kv_cache.row_plan import RowPlan, TreeLayout, blocks_for
from paceline.models.checkpoint import read_model_config
from paceline.models.config import ModelConfig
from paceline.models.tensor_names import num_parameters
from paceline.runtimes.base import FloatArray, LogitsRows, Network, Numerics, assemble_pass, split_into_passes
from paceline.runtimes.cost import time_passes
from paceline.runtimes.load import RuntimeOptions, load_runtime
from paceline.runtimes.logits_summary import LogitsSummary
from paceline.sampling.residual import TokenProbs, draw_distinct
from paceline.small_files import read_json
from paceline.speculation.drafter import FREE_PREFILL_TOKENS, DraftBudget, Drafter, DrafterTraits, PrefillTime, RequestState
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree
from paceline.speculation.tree_growth import Candidate, growing_tree
from paceline.tokenizer.tokenizer import Tokenizer
from paceline.tokenizer.vocabulary import SAMPLE_TEXT, VocabularyComparison, VocabularyMatch, compare_vocabularies

CATCH_UP_ROWS = 256  # rows of one request in one pass that catches up on committed tokens
_PREFILL_PROFILE_ROWS = 32  # rows of the pass that measures the prefill speed

ResultT = TypeVar("ResultT")
TokenPath: TypeAlias = Sequence[int]
"""Draft tokens on the path from the root of the tree to a node; the root, which is committed, is excluded."""


class DraftLogits(NamedTuple):
    """The draft model's logits [V] after a path; and their top tokens ranked by the pass, if sampling needs no more."""

    logits: FloatArray
    ranked: LogitsSummary | None = None


DraftSteps: TypeAlias = Generator[TokenPath, DraftLogits | None, ResultT]
"""Generator of a draft, token by token. It yields the path after which it needs logits: first (), then the previous path plus one token. It
is sent that row, or None if the cache has no room, and returns the draft."""


def draft_chain(depth: int, pick: Callable[[DraftLogits, TokenPath], int | None]) -> DraftSteps[list[int]]:
    """Draft a chain: take one token per row of logits, until `pick` returns None."""
    path: list[int] = []
    while len(path) < depth:
        row = yield path
        token = None if row is None else pick(row, path)
        if token is None:
            break
        path.append(token)
    return path


@dataclass(slots=True)
class _CachedSequenceState:
    """What the draft model's cache holds of a request.

    Attributes:
        token_ids: the cached tokens, in the draft model's ids.
        num_verified: number of first cached tokens that are known to match the request's text.
        num_tokens_at_last_draft: length of the request at its last draft; before the first draft, of its cached prefix.
        start: index of the first token in the request's text; above 0 once the text is longer than the draft model's context.
    """

    sequence: CachedSequence
    token_ids: list[int] = field(default_factory=list)
    num_verified: int = 0
    num_tokens_at_last_draft: int = 0
    start: int = 0


@dataclass(slots=True)
class _Draft(Generic[ResultT]):
    """One request's draft in progress.

    Attributes:
        pending: tokens to run in the next pass; none once the draft is finished.
        depth: maximum number of draft tokens.
        uses_ranking: whether the ranking made by the pass suffices; otherwise whole rows of logits are sampled.
        truncates: whether the request's top-k, top-p or min-p remove tokens.
        level: number of rows of logits received so far.
        result: the finished draft.
    """

    request: Request
    state: _CachedSequenceState
    steps: DraftSteps[ResultT]
    pending: list[int]
    depth: int
    uses_ranking: bool = False
    truncates: bool = False
    level: int = 0
    result: ResultT | None = None


class DraftModelDrafter(Drafter):
    """Drafts with a language model that has the target's token ids, or other ids and a translation.

    Args:
        runtime, cache: network and KV cache of the draft model; only this drafter uses them.
        vocab_size: V of the target; draft ids beyond it are never proposed.
        num_tokenizer_ids: number of ids of the draft model's tokenizer; ids beyond it are padding of its vocabulary, never proposed.
        translation: maps ids of a draft model with another vocabulary; None = it has the target's ids.
        max_model_len: longest text the draft model is prepared for, in its own tokens; None = its maximum.
        tree_width: draft tokens per position; 1 = a chain, else siblings of the chain's tokens, best first.
        note: remarks on the pair for the banner.
        notices: lines for the user at load.
        prefill_token_s: seconds to prefill one token of a long text; 0 = not measured yet.
        mask_token_id: mask token of a PARD model, which drafts all tokens in one pass; None = it drafts one token a pass.
    """

    name = "draft_model"

    def __init__(
        self,
        runtime: Network,
        cache: KVCache,
        *,
        vocab_size: int,
        num_tokenizer_ids: int | None = None,
        translation: SharedPieces | None = None,
        max_model_len: int | None = None,
        tree_width: int = 1,
        note: str = "",
        notices: Sequence[str] = (),
        prefill_token_s: float = 0.0,
        mask_token_id: int | None = None,
    ) -> None:
        self.runtime, self.cache, self._mask_token_id = runtime, cache, mask_token_id
        self._vocab_size = vocab_size
        self._num_tokenizer_ids = runtime.config.vocab_size if num_tokenizer_ids is None else num_tokenizer_ids
        self._translation = translation
        self.max_model_len = runtime.config.max_positions if max_model_len is None else max_model_len
        self._max_depth = self.max_model_len // 2
        self._tree_width = tree_width
        self.traits = DrafterTraits(
            _banner_text(runtime, tree_width, note, in_one_pass=mask_token_id is not None),
            notices,
            cache_bytes_per_token=cache.bytes_per_token,
        )
        self._states = RequestState[_CachedSequenceState]()
        self._prefill_time = PrefillTime(prefill_token_s)
        self._sampler = DraftSampler(None, vocab_size, self._num_tokenizer_ids)
        self._ranking, self._truncated_ranking = self._sampler.ranking(tree_width), self._sampler.truncated_ranking(tree_width)

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        drafts: list[_Draft[DraftTree | None] | None] = []
        for request, budget in zip(requests, budgets, strict=True):
            context = request.token_ids if self._translation is None else self._translation.context(request)
            depth = min(budget.max_depth, budget.row_budget - 1, self._max_depth)
            draft = self._start_draft(request, context, len(context), depth, self._draft_steps(request, replace(budget, max_depth=depth)))
            if draft is not None:
                is_drawn = budget.needs_draft_probs and not request.params.is_greedy
                draft.uses_ranking = self._translation is None and request.processor.keeps_logits and not is_drawn
                draft.truncates = request.params.truncates
            drafts.append(draft)
        self._run_until_finished(requests, drafts)
        return [None if draft is None else draft.result for draft in drafts]

    def generate(
        self, requests: Sequence[Request], contexts: Sequence[tuple[Sequence[int], int]], counts: Sequence[int]
    ) -> list[list[int]]:
        """Return the draft model's most probable continuation of each context, in its own ids; empty if the context has no room.

        Args:
            contexts: ids of each request's whole text, and how many of them are unchanged since the last call.
            counts: tokens to generate.
        """
        drafts: list[_Draft[list[int]] | None] = []
        for request, (context, num_unchanged), count in zip(requests, contexts, counts, strict=True):
            depth = min(count, self._max_depth)
            steps = draft_chain(depth, lambda row, _: int(np.argmax(row.logits[: self._num_tokenizer_ids])))
            drafts.append(self._start_draft(request, context, num_unchanged, depth, steps))
        self._run_until_finished(requests, drafts)
        return [draft.result or [] if draft is not None else [] for draft in drafts]

    def prefill_s(self, request: Request) -> float:
        state, length = self._get_or_create_state(request), len(request.token_ids)
        if length - state.start >= self.max_model_len:  # the next draft drops the text before a later token
            return self._prefill_time.expected_s(self.max_model_len // 2)
        return self._prefill_time.expected_s(length - state.num_tokens_at_last_draft)

    def release(self, request: Request) -> None:
        state = self._states.pop(request)
        if state is not None:
            self.cache.release(state.sequence)

    def _start_draft(
        self, request: Request, context: Sequence[int], num_unchanged: int, depth: int, steps: DraftSteps[ResultT]
    ) -> _Draft[ResultT] | None:
        if depth < 1 or not context:
            return None
        state = self._get_or_create_state(request)
        if not 0 <= state.start < len(context) or len(context) - state.start + depth > self.max_model_len:
            self._reset_cache(state, request, max(0, len(context) + depth - self.max_model_len), depth)
        context, num_unchanged = context[state.start :], max(0, num_unchanged - state.start)
        if not state.token_ids:  # tokens in the prefix cache need not run again
            state.num_verified = self.cache.match_prefix(state.sequence, context)
            state.token_ids.extend(context[: state.num_verified])
        state.num_tokens_at_last_draft = len(request.token_ids)
        self._truncate_rejected(state, context, num_unchanged)
        self.cache.register_prefix(state.sequence, state.token_ids)
        pending = list(context[len(state.token_ids) :])
        if max(pending) >= self.runtime.config.vocab_size:  # the target has more ids
            return None
        next(steps)  # run the generator up to its first request for logits, those of the root
        return _Draft(request, state, steps, pending, depth)

    def _get_or_create_state(self, request: Request) -> _CachedSequenceState:
        """Return the request's state, created if new. With translated ids, no prefix hit is expected."""
        state = self._states.get(request)
        if state is None:
            state = self._states[request] = _CachedSequenceState(self.cache.new_sequence(request.sequence.salt))
            if self._translation is None:
                state.num_tokens_at_last_draft = self.cache.cached_prefix_len(state.sequence, request.token_ids)
        return state

    def _reset_cache(self, state: _CachedSequenceState, request: Request, num_excess_tokens: int, depth: int) -> None:
        """Drop all rows, and start at a later token if the text is longer than the context: half of it stays free for later tokens."""
        self.cache.release(state.sequence)
        state.sequence = self.cache.new_sequence(request.sequence.salt)
        state.token_ids.clear()
        state.num_verified = 0
        state.start = num_excess_tokens + (self.max_model_len - depth) // 2 if num_excess_tokens else 0

    def _truncate_rejected(self, state: _CachedSequenceState, token_ids: Sequence[int], num_unchanged: int) -> None:
        """Truncate the cache to the rows whose tokens the target committed; the root always runs again, for its logits."""
        num_matching = min(state.num_verified, num_unchanged)
        limit = min(len(state.token_ids), len(token_ids) - 1)
        while num_matching < limit and state.token_ids[num_matching] == token_ids[num_matching]:
            num_matching += 1
        state.num_verified = self.cache.truncate(state.sequence, min(num_matching, limit))
        del state.token_ids[state.num_verified :]

    def _run_until_finished(self, requests: Sequence[Request], drafts: Sequence[_Draft[ResultT] | None]) -> None:
        """Run passes until every draft is finished."""
        active = [draft for draft in drafts if draft is not None]
        try:
            self._catch_up(active)
            while active := [draft for draft in active if draft.pending]:
                for part in split_into_passes(active, lambda draft: len(draft.pending) + self._num_mask_tokens(draft)):
                    ran, found = self._run_pass(part, [draft.pending for draft in part], needs_logits=True)
                    for draft, rows in zip(ran, found, strict=True):
                        for row in rows:
                            if draft.pending:
                                self._send_row(draft, row)
                        if draft.pending and self._mask_token_id is not None:
                            self._send_row(draft, None)
        except BaseException:
            for request in requests:  # an interrupted pass leaves no valid rows
                self.release(request)
            raise

    def _catch_up(self, drafts: Sequence[_Draft[ResultT]]) -> None:
        """Run all but the last chunk of long uncached texts."""
        while behind := [draft for draft in drafts if len(draft.pending) > CATCH_UP_ROWS]:
            for part in split_into_passes(behind, lambda _: CATCH_UP_ROWS):
                ran, _ = self._run_pass(part, [draft.pending[:CATCH_UP_ROWS] for draft in part], needs_logits=False)
                for draft in ran:
                    del draft.pending[:CATCH_UP_ROWS]
                    draft.state.num_verified = len(draft.state.token_ids)  # all are prompt tokens

    def _num_mask_tokens(self, draft: _Draft[ResultT]) -> int:
        return 0 if self._mask_token_id is None else draft.depth - 1

    def _send_row(self, draft: _Draft[ResultT], row: DraftLogits | None) -> None:
        """Send a draft its next row of logits; None ends the draft."""
        draft.level += 1
        try:
            token = draft.steps.send(row)[-1]
            draft.pending = [token if self._translation is None else self._translation.draft_id(token)]
        except StopIteration as end:
            draft.pending, draft.result = [], end.value

    def _draft_steps(self, request: Request, budget: DraftBudget) -> DraftSteps[DraftTree | None]:
        if budget.needs_draft_probs and not request.params.is_greedy:
            return self._rejection_sampling_steps(request, budget)
        if self._tree_width == 1 or budget.layout is TreeLayout.CHAIN:
            return self._chain_steps(request, budget)
        return self._tree_steps(request, budget)

    def _chain_steps(self, request: Request, budget: DraftBudget) -> DraftSteps[DraftTree | None]:
        """Draft a chain; it ends if no token is allowed, or if the path's probability falls below `min_path_prob`."""
        path: list[int] = []
        probs: list[float] = []
        path_prob = 1.0
        while len(path) < budget.max_depth and path_prob >= budget.min_path_prob:
            row = yield path
            drafted = self._sample(request, row, path, 1)
            if not drafted.token_ids:
                break
            path.append(drafted.token_ids[0])
            probs.append(drafted.probs[0])
            path_prob *= budget.acceptance_rate(probs[-1])
        return DraftTree.chain(request.token_ids[-1], path, self.name, probs) if path else None

    def _tree_steps(self, request: Request, budget: DraftBudget) -> DraftSteps[DraftTree | None]:
        """Draft the chain of `_chain_steps` plus siblings, chosen by expected tokens per row of the target's pass."""
        root: TokenPath | None = ()
        growth, path_prob = growing_tree(request.token_ids[-1], budget, root), 1.0
        try:
            path = next(growth)
            while True:
                is_expanded = path is not None and path_prob >= budget.min_path_prob  # improbable nodes get neither siblings nor children
                candidates = self._candidates(request, (yield path), path) if path is not None and is_expanded else []
                path_prob *= budget.acceptance_rate(candidates[0][1]) if candidates else 1.0
                path = growth.send(candidates)
        except StopIteration as end:
            tree: DraftTree | None = end.value
            return tree

    def _rejection_sampling_steps(self, request: Request, budget: DraftBudget) -> DraftSteps[DraftTree | None]:
        """Draft tokens drawn from the rows, with their distributions; the number of draws at a node does not depend on any draw."""
        token_ids: list[int] = []
        parents: list[int] = []
        draft_probs: dict[int, TokenProbs] = {}
        path, node = list[int](), 0
        key = request.seed, request.sample_index, len(request.token_ids)
        for count in _tokens_per_level(self._tree_width, budget.max_depth, budget.row_budget, budget.layout):
            row = yield path
            if row is None:
                break
            try:
                draft_probs[node] = TokenProbs.from_distribution(request.processor.process(self._as_target_row(row.logits), path))
            except RequestError:  # no token is allowed
                break
            tokens = draw_distinct(draft_probs[node], count, *key, len(path))
            parents += [node] * len(tokens)
            node = len(token_ids) + 1
            token_ids += tokens
            path.append(tokens[0])
        return DraftTree.grow(request.token_ids[-1], token_ids, parents, self.name, draft_probs) if token_ids else None

    def _sample(self, request: Request, row: DraftLogits | None, path: TokenPath, width: int) -> DraftTokens:
        """Sample up to `width` draft tokens from the logits after a path."""
        if row is None:
            return NO_TOKENS
        ranked = row.ranked
        if ranked is not None and math.isfinite(ranked.log_sum):
            if not request.params.truncates:
                return self._sampler.sample_ranked(ranked, width, is_greedy=request.params.is_greedy)
            drafted = self._sampler.sample_truncated(request, path, ranked, width)
            if drafted is not None:
                return drafted
        try:
            return self._sampler.sample_target_row(request, path, self._as_target_row(row.logits), width, needs_draft_probs=False)
        except RequestError:  # no token is allowed
            return NO_TOKENS

    def _candidates(self, request: Request, row: DraftLogits | None, path: TokenPath) -> list[Candidate[TokenPath | None]]:
        """Return the sampled tokens as candidates; only the first one can be expanded."""
        drafted = self._sample(request, row, path, self._tree_width)
        return [
            (token, prob, self.name, None if rank else (*path, token))
            for rank, (token, prob) in enumerate(zip(drafted.token_ids, drafted.probs, strict=True))
        ]

    def _as_target_row(self, row: FloatArray) -> FloatArray:
        """Return the row over the target's ids: padding cropped, or added as -inf."""
        if self._translation is not None:
            return self._translation.target_row(row)
        row = row[: min(self._vocab_size, self._num_tokenizer_ids)]
        if len(row) == self._vocab_size:
            return row
        return np.concatenate([row, np.full(self._vocab_size - len(row), -np.inf, np.float32)])

    def _run_pass(
        self, drafts: Sequence[_Draft[ResultT]], token_ids: Sequence[list[int]], *, needs_logits: bool
    ) -> tuple[list[_Draft[ResultT]], list[list[DraftLogits]]]:
        """Run one pass of the draft model; a draft that gets no cache block ends.

        Returns:
            the drafts that ran, and for each the logits of its next token; with a mask token also those of later tokens.
        """
        ran, plans, rows = list[_Draft[ResultT]](), list[RowPlan](), list[list[int]]()
        for draft, ids in zip(drafts, token_ids, strict=True):
            masks = [self._mask_token_id] * self._num_mask_tokens(draft) if needs_logits and self._mask_token_id is not None else []
            try:
                # The last row of a text may be cut and run again, for its logits; rows before it match the text.
                num_known = len(ids) - needs_logits if len(ids) > 1 else 1
                state, num_rows = draft.state, len(ids) + len(masks)
                plans.append(self.cache.reserve(state.sequence, range(-1, num_rows - 1), num_known, pinned_len=state.num_verified))
            except CapacityError:
                self._send_row(draft, None)
                self.release(draft.request)
                continue
            ran.append(draft)
            rows.append([*ids, *masks])
        if not ran:
            return ran, []
        firsts = [len(ids) - self._num_mask_tokens(draft) - 1 for draft, ids in zip(ran, rows, strict=True)] if needs_logits else []
        wanted = [range(first, len(ids)) for first, ids in zip(firsts, rows, strict=True)] if needs_logits else [range(0)] * len(rows)
        start = perf_counter()
        inputs, batch, logits_rows = assemble_pass(plans, rows, wanted)
        is_ranked = needs_logits and any(draft.uses_ranking for draft in ran)
        if is_ranked:
            logits_rows = self._add_ranking(logits_rows, ran, [len(own) for own in wanted])
        output = self.runtime.forward(inputs, batch, logits_rows)
        num_rows = sum(map(len, rows))
        if num_rows > FREE_PREFILL_TOKENS * len(rows):
            self._prefill_time.observe(num_rows, perf_counter() - start)
        for draft, ids, own in zip(ran, rows, wanted, strict=True):
            num_kept = own[0] + 1 if own else len(ids)
            self.cache.keep_path(draft.state.sequence, num_kept - 1)
            draft.state.token_ids.extend(ids[:num_kept])
        if not needs_logits:
            return ran, []
        ranked = iter(output.summaries if is_ranked else [None] * len(output.logits))
        found = [DraftLogits(logits, next(ranked)) for logits in output.logits]
        ends = list(accumulate(map(len, wanted)))
        return ran, [
            [row if draft.uses_ranking else DraftLogits(row.logits) for row in found[end - len(own) : end]]
            for draft, own, end in zip(ran, wanted, ends, strict=True)
        ]

    def _add_ranking(self, logits_rows: LogitsRows, drafts: Sequence[_Draft[ResultT]], num_rows: Sequence[int]) -> LogitsRows:
        drawn = [
            (draft.request, draft.level + index) if draft.uses_ranking and not draft.request.params.is_greedy else None
            for draft, count in zip(drafts, num_rows, strict=True)
            for index in range(count)
        ]
        truncates = any(draft.truncates and draft.uses_ranking for draft in drafts)
        return logits_rows._replace(summary=self._truncated_ranking if truncates else self._ranking, sampling=token_draws(drawn))


def _banner_text(runtime: Network, tree_width: int, note: str, *, in_one_pass: bool) -> str:
    num_layers = runtime.config.num_layers
    layers = f"{num_layers} layer{'s' if num_layers > 1 else ''}"
    shape = "" if tree_width == 1 else f", {tree_width} tokens a position"
    shape += ", PARD: all tokens in one pass" if in_one_pass else ""
    return f"draft_model ({layers}, hidden size {runtime.config.hidden_size}{shape}{note})"


@lru_cache(maxsize=256)
def _tokens_per_level(width: int, depth: int, row_budget: int, layout: TreeLayout) -> tuple[int, ...]:
    """Return the draft tokens per level of a chain with `width` - 1 siblings next to each token, within `row_budget` rows."""
    parents = [1 + (level - 1) * width if level else 0 for level in range(depth) for _ in range(width)]
    tree = DraftTree.grow(0, [*range(width)] * depth, parents, "").trim(
        vocab_size=width, max_depth=depth, row_budget=row_budget, layout=layout
    )
    return tuple(tree.depths.count(level) for level in range(1, tree.tree_depth + 1))


def open_draft_model(directory: Path, target: LoadedTarget) -> Drafter:
    """Load a draft model, and choose how its tokens become the target's.

    Raises:
        IncompatibleDrafterError: the pieces of its vocabulary cannot spell half of the target's.
        CheckpointError: its files are damaged or incomplete.
    """
    config = read_model_config(directory)
    tokenizer = Tokenizer.open(directory)
    comparison = compare_vocabularies(target.tokenizer, tokenizer)
    if comparison.is_unusable:
        raise IncompatibleDrafterError(
            f"draft model {directory} cannot draft for {target.directory}: {comparison.why_unusable()}. "
            "Use a draft model of the same family (same tokenizer), or drafter='ngram'"
        )
    has_all_ids = comparison.is_compatible and comparison.coverage == 1.0
    token_ratio = 1.0 if has_all_ids else _token_ratio(target.tokenizer, tokenizer)
    max_model_len = min(math.ceil(target.max_model_len * token_ratio), config.max_positions)
    mask_token_id = read_mask_token(directory, config)
    runtime, cache = _load_runtime(directory, target, max_model_len, token_ratio)
    passes = time_passes(runtime, cache, (_PREFILL_PROFILE_ROWS,), max_model_len=max_model_len, repeats=1, with_logits=False)
    translation, tokenizers = None, None
    if not has_all_ids:
        own, other = ByteTokenizer(target.tokenizer), ByteTokenizer(tokenizer)
        if comparison.match is not VocabularyMatch.DISJOINT:
            translation = SharedPieces(own, other, vocab_size=target.vocab_size, draft_vocab_size=runtime.config.vocab_size)
        else:
            tokenizers = own, other
    drafter = DraftModelDrafter(
        runtime,
        cache,
        vocab_size=target.vocab_size,
        num_tokenizer_ids=min(tokenizer.vocab_size, runtime.config.vocab_size),
        translation=translation,
        max_model_len=max_model_len,
        tree_width=target.speculation.tree_width,
        notices=[line for line in [too_large(directory, config, target.runtime.config)] if line],
        note=_compatibility_note(
            comparison, max_model_len, math.ceil(target.max_model_len * token_ratio), target.speculation.draft_adapter
        ),
        prefill_token_s=passes[_PREFILL_PROFILE_ROWS] / _PREFILL_PROFILE_ROWS,
        mask_token_id=mask_token_id,
    )
    return drafter if tokenizers is None else TextDrafter(drafter, *tokenizers)


def too_large(directory: Path, draft: ModelConfig, target: ModelConfig) -> str:
    """Return why a draft model cannot pay: it has as many parameters as its target. Empty = it may pay.

    PARD models draft all tokens in one pass, and may pay at any size.
    """
    size, target_size = num_parameters(draft), num_parameters(target)
    if size < target_size or read_mask_token(directory, draft) is not None:
        return ""
    return (
        f"the draft model has {size:,} parameters, the target {target_size:,}: a draft pass costs as much as a plain step, so drafting "
        "cannot pay"
    )


def read_mask_token(directory: Path, config: ModelConfig) -> int | None:
    """Return the mask token of a PARD draft model; None for any other language model.

    Raises:
        CheckpointError: the mask token is not an id of the model.
        IncompatibleDrafterError: a PARD-2 model, which also reads the target's hidden states.
    """
    path = directory / "config.json"
    values = read_json(path) if path.is_file() else {}
    if not isinstance(values, dict) or "pard_token" not in values:
        return None
    if any(name.startswith("pard2") for name in values):
        raise IncompatibleDrafterError(f"{directory} is a PARD-2 draft model, which is not supported; PARD models are")
    token = values["pard_token"]
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < config.vocab_size:
        raise CheckpointError(f"{path}: pard_token = {token!r}, expected an id below {config.vocab_size}; download it again")
    return token


def _load_runtime(directory: Path, target: LoadedTarget, max_model_len: int, token_ratio: float) -> tuple[Network, KVCache]:
    """Load the draft model, with a cache for as many tokens as the target's.

    Args:
        token_ratio: draft-model tokens per target token.
    """
    adapter = None if target.speculation.draft_adapter is None else Path(target.speculation.draft_adapter)
    options = RuntimeOptions(
        numerics=Numerics.FAST,
        num_threads=target.engine.num_threads,
        max_model_len=max_model_len,
        device=target.engine.device,
        quantization=target.draft_model_quant,
        quant_directory=cache_directory(),
        memory_bytes=None if adapter is None else target.memory_bytes,
        merge_adapter=adapter,
    )
    runtime = load_runtime(directory, options).runtime
    num_blocks = 1 + blocks_for(math.ceil(target.cache.max_slots * token_ratio), BLOCK_SIZE)  # one more for the pass that measures prefill
    max_checkpoints = target.engine.max_num_seqs if target.cache.prefix_caching else 0
    cache = runtime.new_cache(
        num_blocks, checkpoints=CheckpointConfig(interval=target.engine.state_interval, max_checkpoints=max_checkpoints)
    )
    cache.prefix_caching = target.cache.prefix_caching
    return runtime, cache


def _token_ratio(target: Tokenizer, draft: Tokenizer) -> float:
    """Estimate the draft model's tokens per target token of a text, with a margin; at least 1."""
    counts = [len(tokenizer.encode(SAMPLE_TEXT, add_special_tokens=False)) for tokenizer in (draft, target)]
    return max(1.0, 1.25 * counts[0] / max(1, counts[1]))


def _compatibility_note(comparison: VocabularyComparison, max_model_len: int, required_context: int, adapter: str | None) -> str:
    """Return remarks for the banner on an adapter, and a vocabulary or context that differs from the target's."""
    note = "" if adapter is None else f"; with the adapter {Path(adapter).name or adapter}"
    note += "" if comparison.coverage == 1.0 else f"; {comparison.match.value} vocabularies: {comparison.describe_conversion()}"
    if max_model_len < required_context:
        note += f"; drafts from the last tokens of texts longer than its context of {max_model_len}"
    return note

"""One step of speculative decoding. Start reading here.

    propose    draft a tree after the last token of every request that decodes          propose.py
    reserve    reserve cache slots for all rows; drafts shrink if there are too few     propose.py
    forward    run the target once over all rows: prompt chunks, last tokens, drafts
    verify     sample the target's own tokens along each tree                           verify.py
    commit     append the accepted tokens and one bonus token                           commit.py
    keep       keep the cache rows of the accepted path, free those of rejected tokens  kv_cache/cache.py
    observe    update the policy's rates and times, and pass kept rows to drafters      speculator.py

A prompt, or the tokens of a preempted request, are cached first, in chunks of one or more steps. The last chunk is a plain step and emits a
token; the others emit none. The bonus token has no cached row yet: it is the root of the next step's draft.
"""

from collections.abc import Sequence
from time import perf_counter

from paceline.errors import CheckpointError, as_exception, is_interrupt
from paceline.kv_cache.cache import KVCache
from paceline.runtimes.base import Network, assemble_pass
from paceline.sampling.path_sampler import LogitsView, sample_paths
from paceline.speculation.commit import commit, prompt_logprobs, token_logprobs
from paceline.speculation.propose import reserve_rows
from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.speculator import Speculator
from paceline.speculation.stats import StepRecord
from paceline.speculation.tree import DraftTree


class PassInterrupted(BaseException):
    """The target's pass was interrupted; `__cause__` is the interrupt. Nothing was committed: requests are as they were before the step."""


def step(
    requests: Sequence[Request],
    num_new_tokens: Sequence[int],
    target: Network,
    cache: KVCache,
    speculator: Speculator,
    *,
    max_rows: int | None = None,
) -> None:
    """Advance every request by one target pass. Requests whose last token is in the pass emit at least one token each, or fail alone.

    Args:
        requests: unfinished requests, each with a sequence in `cache`.
        num_new_tokens: for each request, how many of its tokens without cached rows run in this pass.
        max_rows: maximum number of rows of the pass; drafts get what the other rows leave. None = no limit.

    Raises:
        CapacityError: the rows without drafts do not fit in the cache; nothing was changed.
        PassInterrupted: KeyboardInterrupt or the like during the target's pass. At other times the interrupt itself is raised.
        Exception: the target's pass failed; nothing was committed.
    """
    start_s = perf_counter()
    batch = [RequestRows.without_draft(request, count) for request, count in zip(requests, num_new_tokens, strict=True)]
    speculator.propose(batch, max_rows)
    _forward(batch, target, cache, speculator)
    for rows in batch:
        try:
            _verify_and_commit(rows, cache, speculator)
        except BaseException as error:  # an error of one request, such as NaN logits or no allowed token: only this request ends
            if is_interrupt(error):
                raise
            _fail(rows.request, as_exception(error), cache)
    speculator.observe(batch, perf_counter() - start_s)


def _forward(batch: Sequence[RequestRows], target: Network, cache: KVCache, speculator: Speculator) -> None:
    """Reserve slots, run the target, and sample the requests whose trees the compiled sampler can sample."""
    plans, nodes = reserve_rows(batch, cache), [rows.logits_nodes for rows in batch]
    arguments = assemble_pass(plans, [rows.token_ids for rows in batch], nodes, [rows.request.adapter_number for rows in batch])
    try:
        output = speculator.forward(target, arguments)
    except BaseException as error:
        for rows in batch:
            cache.drop_reserved_rows(rows.request.cached_sequence)
        if is_interrupt(error):
            raise PassInterrupted from error
        raise
    view = LogitsView(output.logits[:, : speculator.vocab_size], output.block_max)
    for rows, plan_output in zip(batch, output.split_by_plan(plans, nodes), strict=True):
        rows.set_output(plan_output, view.logits)
    paths = sample_paths([speculator.sampler_input(rows) for rows in batch], view)
    for rows, path in zip(batch, paths, strict=True):
        rows.sampled_path = path


def _verify_and_commit(rows: RequestRows, cache: KVCache, speculator: Speculator) -> None:
    """Verify one request's tree, commit its tokens, keep the cache rows of the accepted path and free those of rejected tokens."""
    request = rows.request
    if request.error is not None:  # a drafter removed tokens: these rows must not get into the prefix cache
        raise request.error
    if request.needs_prompt_logits:
        request.prompt_logprobs.extend(prompt_logprobs(request, rows.prompt_logits))
    if rows.tree is not None:
        _accept(rows, rows.tree, speculator)
    rows.is_observed = request.is_speculative
    cache.keep_path(request.cached_sequence, rows.kept_nodes[-1])
    cache.register_prefix(request.cached_sequence, request.token_ids)


def _accept(rows: RequestRows, tree: DraftTree, speculator: Speculator) -> None:
    """Verify one request's tree, append the accepted tokens and the bonus token to the request, and count the step."""
    request = rows.request
    nodes, token_ids = speculator.verify(rows, tree)
    logprobs = token_logprobs(token_ids, nodes, rows.logits, request) if request.params.logprobs is not None else ()
    num_emitted = commit(request, token_ids, len(nodes), has_draft=tree.num_draft_tokens > 0, logprobs=logprobs)
    accepted = nodes[:num_emitted]
    request.stats.record(tree.depths[1:], len(accepted), num_emitted, rows.skip_reason)
    if request.keeps_step_records:
        start, emitted = request.num_output_tokens - num_emitted, tuple(token_ids[:num_emitted])
        draft = tuple(tree.token_ids[1:]), tuple(tree.parents[1:]), tuple(tree.sources[1:])
        expected = rows.expected_tokens, rows.expected_speedup
        request.steps.append(StepRecord(start, emitted, *draft, tuple(accepted), rows.skip_reason, *expected))
    if tree.num_draft_tokens > 0:
        speculator.observe_verified(request, tree, nodes)
    rows.keep_accepted(accepted)


def _fail(request: Request, error: Exception, cache: KVCache) -> None:
    """Finish a request with an error. If its logits were NaN or infinite, its rows are removed from the prefix cache."""
    cache.drop_reserved_rows(request.cached_sequence)
    if isinstance(error, CheckpointError):
        cache.unregister_prefix(request.cached_sequence)
        if request.adapter is not None:
            error = CheckpointError(f"with the adapter {request.adapter!r}, whose values may be too large, {error}")
    request.fail(error)

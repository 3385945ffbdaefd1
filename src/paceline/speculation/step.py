"""One step of speculative decoding. Start reading here.

    propose    draft a tree under the last token of every request that decodes          propose.py
    reserve    take cache slots for all rows; drafts shrink if blocks are short         propose.py
    forward    run the target once over all rows: prompt chunks, last tokens, drafts
    verify     draw the target's own tokens along each tree                             verify.py
    commit     append the accepted tokens and one bonus token                           commit.py
    keep       keep the cache rows of the accepted path, free those of rejected tokens  kv_cache/cache.py
    observe    update the policy's rates and times, and give drafters the kept rows     speculator.py

A request whose tokens are not all cached (a prompt, or after preemption) runs those first, in chunks; the chunk with its last token is a
plain step. The bonus token has no cached row yet: it is the root of the next step's draft.
"""

from collections.abc import Sequence
from time import perf_counter

from paceline.errors import CheckpointError, as_exception, is_interrupt
from paceline.kv_cache.cache import KVCache
from paceline.runtimes.base import Network, assemble_pass
from paceline.sampling.path_sampler import LogitsView, sample_paths
from paceline.speculation.commit import commit, prompt_logprobs, token_logprobs
from paceline.speculation.propose import reserve
from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.speculator import Speculator
from paceline.speculation.stats import StepRecord
from paceline.speculation.tree import DraftTree


class PassInterrupted(BaseException):
    """An interrupt (`__cause__`) during the target's pass. Nothing was committed; every request is as it was before the step."""


def step(
    requests: Sequence[Request],
    num_new_tokens: Sequence[int],
    target: Network,
    cache: KVCache,
    speculator: Speculator,
    *,
    max_rows: int | None = None,
) -> None:
    """Advance every request by one target pass. Each whose last token runs emits at least one token, or fails without the others.

    Args:
        requests: unfinished, each with a sequence in `cache`.
        num_new_tokens: by request, how many of its tokens without cached rows run.
        max_rows: most rows of the pass; drafts get what the other rows leave. None = no limit.

    Raises:
        CapacityError: the rows without drafts do not fit in the cache; nothing was changed.
        PassInterrupted: KeyboardInterrupt or the like during the target's pass. Elsewhere it is raised as it is.
        Exception: the target's pass failed; nothing was committed.
    """
    start_s = perf_counter()
    batch = [RequestRows.without_draft(request, count) for request, count in zip(requests, num_new_tokens, strict=True)]
    speculator.propose(batch, max_rows)
    _forward(batch, target, cache, speculator)
    for rows in batch:
        try:
            _verify_and_commit(rows, cache, speculator)
        except BaseException as error:  # no token is allowed, its grammar broke, its row is NaN: other requests go on
            if is_interrupt(error):
                raise
            _fail(rows.request, as_exception(error), cache)
    speculator.observe(batch, perf_counter() - start_s)


def _forward(batch: Sequence[RequestRows], target: Network, cache: KVCache, speculator: Speculator) -> None:
    """Reserve slots, run the target, and sample the paths of all requests whose rows the compiled sampler can draw from."""
    plans, nodes = reserve(batch, cache), [rows.logits_nodes for rows in batch]
    arguments = assemble_pass(plans, [rows.token_ids for rows in batch], nodes, [rows.request.adapter_number for rows in batch])
    try:
        output = speculator.forward(target, arguments)
    except BaseException as error:
        for rows in batch:
            cache.cancel(rows.request.sequence)
        if is_interrupt(error):
            raise PassInterrupted from error
        raise
    view = LogitsView(output.logits[:, : speculator.vocab_size], output.block_max, output.logits_address, output.block_max_address)
    for rows, own in zip(batch, output.split_by_plan(plans, nodes), strict=True):
        rows.set_output(own, view.logits)
    paths = sample_paths([speculator.path_request(rows) for rows in batch], view)
    for rows, path in zip(batch, paths, strict=True):
        rows.path = path


def _verify_and_commit(rows: RequestRows, cache: KVCache, speculator: Speculator) -> None:
    """Verify one request's tree, commit its tokens, keep the cache rows of the accepted path and free those of rejected tokens."""
    request = rows.request
    if request.needs_prompt_logits:
        request.prompt_logprobs.extend(prompt_logprobs(request, rows.prompt_logits))
    if rows.tree is not None:
        _accept(rows, rows.tree, speculator)
    rows.is_observed = request.is_speculative
    cache.keep_path(request.sequence, rows.kept_nodes[-1])  # keep the path to the last accepted node; all other rows of the pass are freed
    cache.register_prefix(request.sequence, request.token_ids)


def _accept(rows: RequestRows, tree: DraftTree, speculator: Speculator) -> None:
    """Append the accepted tokens and the bonus token to the request, and count the step."""
    request = rows.request
    nodes, token_ids = speculator.verify(rows, tree)
    logprobs = token_logprobs(token_ids, nodes, rows.logits, request) if request.params.logprobs is not None else ()
    num_emitted = commit(request, token_ids, len(nodes), has_draft=tree.num_draft_tokens > 0, logprobs=logprobs)
    accepted = nodes[:num_emitted]
    request.stats.record(tree.depths[1:], len(accepted), num_emitted, rows.skip_reason)
    if request.keeps_steps:
        start, emitted = request.num_output_tokens - num_emitted, tuple(token_ids[:num_emitted])
        draft = tuple(tree.token_ids[1:]), tuple(tree.parents[1:]), tuple(tree.sources[1:])
        expected = rows.expected_tokens, rows.expected_speedup
        request.steps.append(StepRecord(start, emitted, *draft, tuple(accepted), rows.skip_reason, *expected))
    if tree.num_draft_tokens > 0:
        speculator.observe_verified(request, tree, nodes)
    rows.keep_accepted(accepted)


def _fail(request: Request, error: Exception, cache: KVCache) -> None:
    """Finish a request with its own error. After NaN or infinite values its rows are removed from the prefix cache."""
    cache.cancel(request.sequence)
    if isinstance(error, CheckpointError):
        cache.evict(request.sequence)
        if request.adapter is not None:
            error = CheckpointError(f"with the adapter {request.adapter!r}, whose values may be too large, {error}")
    request.fail(error)

"""One step of speculative decoding. Start reading here.

    propose    a draft tree under the last token of every request that decodes          propose.py
    forward    one pass of the target over all rows: prompt chunks, last tokens, drafts
    verify     draw the target's own tokens along each tree                             verify.py
    commit     append the accepted tokens and one bonus token, until a request finishes commit.py
    observe    give the policy acceptance and times, and drafters the permanent rows    speculator.py

A request whose tokens are not all cached (a prompt, or one that was preempted) brings those rows first, in chunks; the chunk that reaches
its last token is a plain step. The bonus token has no cached row yet: it is the root of the next step.
"""

from collections.abc import Sequence
from time import perf_counter

from paceline.errors import CheckpointError, as_exception, is_interrupt
from paceline.kv_cache.paged import KVCache
from paceline.runtimes.base import Network, assemble
from paceline.sampling.path_sampler import LogitsView, sample_paths
from paceline.speculation.commit import commit, prompt_logprobs, token_logprobs
from paceline.speculation.propose import reserve
from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.speculator import Speculator
from paceline.speculation.step_record import StepRecord


class PassInterrupted(BaseException):
    """An interrupt during the target's pass (`__cause__`): nothing was committed, and every request is as it was before."""


def step(
    requests: Sequence[Request],
    num_rows: Sequence[int],
    target: Network,
    cache: KVCache,
    speculator: Speculator,
    *,
    max_rows: int | None = None,
) -> None:
    """Advance every request by one target pass; each that has reached its last token emits at least one token, or fails alone.

    Args:
        requests: unfinished, each with a sequence in `cache`.
        num_rows: by request, how many of its tokens that are not cached run (`Request.num_next_tokens`).
        max_rows: of the pass; drafts take what is left of them. None = no limit.

    Raises:
        CapacityError: the tokens that are no drafts do not fit in the cache; nothing was changed.
        PassInterrupted: KeyboardInterrupt or the like during the target's pass. Elsewhere it is raised as it is.
        Exception: whatever the target's pass raised; nothing was committed.
    """
    start_s = perf_counter()
    batch = [RequestRows.of(request, count) for request, count in zip(requests, num_rows, strict=True)]
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
    """Run the target, and draw at once what the compiled sampler can draw."""
    plans, wanted = reserve(batch, cache), [rows.logits_nodes for rows in batch]
    arguments = assemble(plans, [rows.token_ids for rows in batch], wanted, [rows.request.adapter_number for rows in batch])
    try:
        output = speculator.forward(target, arguments)
    except BaseException as error:
        for rows in batch:
            cache.cancel(rows.request.sequence)
        if is_interrupt(error):
            raise PassInterrupted from error
        raise
    view = LogitsView.of(output, speculator.vocab_size)
    for rows, own in zip(batch, output.split_by_plan(plans, wanted), strict=True):
        rows.set_output(own, view.logits)
    paths = sample_paths([speculator.path_request(rows) for rows in batch], view)
    for rows, path in zip(batch, paths, strict=True):
        rows.path = path


def _verify_and_commit(rows: RequestRows, cache: KVCache, speculator: Speculator) -> None:
    """Verify one request's tree, commit its tokens and keep the cache rows of the accepted path; those of rejected tokens are freed."""
    request, tree = rows.request, rows.tree
    if rows.wants_prompt_rows:
        request.prompt_logprobs.extend(prompt_logprobs(request, rows.prompt_logits))
    if tree is not None:
        nodes, token_ids = speculator.verify(rows, tree)
        logprobs = token_logprobs(token_ids, nodes, rows.logits, request) if request.params.logprobs is not None else ()
        num_emitted = commit(request, token_ids, len(nodes), drafted=rows.num_draft_tokens > 0, logprobs=logprobs)
        accepted = nodes[:num_emitted]
        request.stats.record(tree.depths[1:], len(accepted), num_emitted, rows.skip_reason)
        if request.speculation.trees:
            start = request.num_output_tokens - num_emitted
            request.steps.append(StepRecord.of(rows, tree, accepted, start, token_ids[:num_emitted]))
        if rows.num_draft_tokens > 0:
            speculator.learn(request, tree, nodes)
        rows.keep(accepted)
    rows.is_observed = not request.speculation.is_off
    cache.keep_path(request.sequence, rows.kept_nodes[-1])
    cache.remember(request.sequence, request.token_ids)


def _fail(request: Request, error: Exception, cache: KVCache) -> None:
    """Finish a request with its own error. Rows of a pass with damaged numbers must not be shared through the prefix cache."""
    cache.cancel(request.sequence)
    if isinstance(error, CheckpointError):
        cache.forget(request.sequence)
        if request.adapter is not None:
            error = CheckpointError(f"with the adapter {request.adapter!r}, whose values may be too large, {error}")
    request.fail(error)

"""One step: guess, check all guesses in one target pass, keep what the target would have said. Start reading here.

    propose (policy, drafter)  →  reserve cache slots  →  one target pass over known tokens, root and tree of every request
                               →  verify (walk the tree)  →  commit, token by token  →  keep the rows of the accepted path
                               →  tell drafter and policy

A request whose known tokens are not all cached (a prompt, or one that was preempted) brings those rows first, in chunks; the chunk
that reaches its last token is a plain step of its own. The bonus token stays pending: it is the root of the next step, never a
pass of its own.
"""

from collections.abc import Sequence
from time import perf_counter

from paceline.errors import CheckpointError, as_exception, is_interrupt
from paceline.kv_cache.paged import KVCache
from paceline.runtimes.base import FloatArray, ForwardOutput, Network, Pass, assemble
from paceline.sampling.path_sampler import LogitsView, SampledPath
from paceline.speculation.commit import commit
from paceline.speculation.drafter import CommittedRows
from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.reserve import reserve
from paceline.speculation.speculator import Speculator
from paceline.speculation.step_record import StepRecord
from paceline.speculation.verify import prompt_logprobs, token_logprobs


class PassInterrupted(BaseException):
    """An interrupt met the target's pass (`__cause__` is it): nothing was committed, every request stands where it stood before."""


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
        num_rows: how many known tokens of each run, as `Request.num_next_tokens` says.
        max_rows: of the pass; guesses take what known tokens leave of them. None = no limit.

    Raises:
        CapacityError: not even the known tokens fit; nothing was changed.
        PassInterrupted: KeyboardInterrupt or the like within the target's pass. Anywhere else it is raised as it is, and what had
            been done by then is done.
        Exception: whatever the target's pass raised; nothing was committed.
    """
    start_s = perf_counter()
    batch = [RequestRows.of(request, count) for request, count in zip(requests, num_rows, strict=True)]
    speculator.propose(batch, max_rows)
    plans, wanted = reserve(batch, cache), [rows.logits_nodes for rows in batch]
    adapters = [request.adapter_number for request in requests]
    output = _forward(requests, assemble(plans, [rows.token_ids for rows in batch], wanted, adapters), target, cache, speculator)
    committed: list[CommittedRows] = []
    observes = speculator.observes
    outputs, view = output.by_plan(plans, wanted), LogitsView.of(output, speculator.vocab_size)
    first_rows = [own.first_logits_row + rows.first_tree_row for rows, own in zip(batch, outputs, strict=True)]
    walks = speculator.walk_together(batch, first_rows, view)
    for rows, own, first_row, walked in zip(batch, outputs, first_rows, walks, strict=True):
        request, start = rows.request, rows.request.sequence.committed_len
        of_tree = view.logits[first_row : own.end_logits_row]
        try:
            if rows.wants_prompt_rows:
                request.prompt_logprobs.extend(prompt_logprobs(request, own.logits[: rows.num_known, : speculator.vocab_size]))
            kept_nodes = _verify_and_commit(rows, of_tree, walked, cache, speculator)
            if observes:
                committed.append(speculator.committed_rows(request, start, kept_nodes, own))
        except BaseException as error:  # its sampling allows no token, its grammar broke, its row is NaN: no other request is concerned
            if is_interrupt(error):
                raise
            _fail(request, as_exception(error), cache)
    speculator.end_step(batch, perf_counter() - start_s)
    speculator.observe(committed)


def _forward(requests: Sequence[Request], arguments: Pass, target: Network, cache: KVCache, speculator: Speculator) -> ForwardOutput:
    """The target's pass. An interrupt within it, by far the longest part of a step, takes back what was reserved and harms no request."""
    try:
        return speculator.forward(target, arguments)
    except BaseException as error:
        for request in requests:
            cache.cancel(request.sequence)
        if is_interrupt(error):
            raise PassInterrupted from error
        raise


def _verify_and_commit(
    rows: RequestRows, logits: FloatArray, walked: SampledPath | None, cache: KVCache, speculator: Speculator
) -> Sequence[int]:
    """Walk one request's tree, commit its tokens and keep their rows; returns the plan's nodes that were kept."""
    request, tree = rows.request, rows.tree
    kept_nodes: Sequence[int] = range(rows.num_known)
    if tree is not None:
        result = speculator.verify(tree, logits, request, walked)
        logprobs = token_logprobs(result, logits, request) if request.params.logprobs is not None else ()
        num_accepted, drafted = len(result.accepted_nodes), len(tree.token_ids) > 1
        num_emitted = commit(request, result.token_ids, num_accepted, drafted=drafted, logprobs=logprobs)
        accepted = result.accepted_nodes[:num_emitted]
        request.stats.record(tree.depths[1:], len(accepted), num_emitted, rows.plain_reason)
        if request.speculation.trees:
            start = request.num_output_tokens - num_emitted
            request.steps.append(StepRecord.of(rows, tree, accepted, start, result.token_ids[:num_emitted]))
        if drafted:
            speculator.learn(request, tree, result.accepted_nodes)
            is_chain = isinstance(tree.parents, range)
            kept_nodes = range(rows.num_known + len(accepted)) if is_chain else [*kept_nodes, *[rows.root + node for node in accepted]]
    cache.keep_path(request.sequence, kept_nodes[-1])
    cache.remember(request.sequence, request.token_ids)
    return kept_nodes


def _fail(request: Request, error: Exception, cache: KVCache) -> None:
    """End a request with its own error; what a pass with damaged numbers left in the cache must not be shared."""
    cache.cancel(request.sequence)
    if isinstance(error, CheckpointError):
        cache.forget(request.sequence)
        if request.adapter is not None:
            error = CheckpointError(f"with the adapter {request.adapter!r}, whose values may be too large, {error}")
    request.fail(error)

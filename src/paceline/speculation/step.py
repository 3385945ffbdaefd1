"""One step: guess, check all guesses in one target pass, keep what the target would have said. Start reading here.

    policy.budget  →  drafter.propose  →  cache.reserve  →  one target pass over root + tree of every request
                   →  verify (walk)    →  commit (token by token)  →  cache.keep_path  →  policy and drafter are told

A request whose known tokens are not all cached (a prompt, or one that was preempted) brings those rows first, in chunks; the chunk
that reaches its last token is a plain step of its own. The bonus token stays pending: it is the root of the next step, never a
pass of its own.
"""

from collections.abc import Sequence
from time import perf_counter

from paceline.errors import CheckpointError, as_exception, is_interrupt
from paceline.kv_cache.paged import KVCache
from paceline.runtimes.base import FloatArray, ForwardBatch, ForwardOutput, Runtime, assemble
from paceline.speculation.commit import commit
from paceline.speculation.drafter import CommittedRows
from paceline.speculation.request import Request
from paceline.speculation.speculator import Speculator
from paceline.speculation.verify import prompt_logprobs, token_logprobs
from paceline.speculation.work import Work, reserve


class PassInterrupted(BaseException):
    """An interrupt met the target's pass (`__cause__` is it): nothing was committed, every request stands where it stood before."""


def step(
    requests: Sequence[Request],
    num_rows: Sequence[int],
    target: Runtime,
    cache: KVCache,
    speculator: Speculator,
    *,
    max_rows: int | None = None,
) -> None:
    """Advance every request by one target pass; each that has reached its last token emits at least one token, or fails alone.

    Args:
        requests: unfinished, each with a sequence in `cache`.
        num_rows: how many known tokens of each run, as `Request.num_due` says.
        max_rows: of the pass; guesses take what known tokens leave of them. None = no limit.

    Raises:
        CapacityError: not even the known tokens fit; nothing was changed.
        PassInterrupted: KeyboardInterrupt or the like within the target's pass. Anywhere else it is raised as it is, and what had
            been done by then is done.
        Exception: whatever the target's pass raised; nothing was committed.
    """
    works = [Work.of(request, count) for request, count in zip(requests, num_rows, strict=True)]
    speculator.propose(works, max_rows)
    plans = reserve(works, cache)
    batch = assemble(plans, [work.token_ids for work in works], [work.logits_nodes for work in works])
    start_s = perf_counter()
    output = _forward(target, batch, works, cache)
    speculator.observe_pass(len(batch.token_ids), perf_counter() - start_s)
    committed: list[CommittedRows] = []
    first_row = first_logits_row = 0
    for work, plan in zip(works, plans, strict=True):
        start, num_logits = work.request.sequence.committed_len, len(work.logits_nodes)
        try:
            logits = output.logits[first_logits_row : first_logits_row + num_logits, : speculator.vocab_size]
            kept = _settle(work, logits, cache, speculator)
            rows = [first_row + plan.row_of_node[node] for node in kept]
            committed.append(_features(CommittedRows(work.request, start, len(rows)), rows, output, speculator))
        except BaseException as error:  # its sampling allows no token, its grammar broke, its row is NaN: nobody else is concerned
            if is_interrupt(error):
                raise
            _fail(work.request, as_exception(error), cache)
        first_logits_row += num_logits
        first_row += plan.num_rows
    speculator.observe(committed)


def _forward(target: Runtime, batch: ForwardBatch, works: Sequence[Work], cache: KVCache) -> ForwardOutput:
    """The target's pass, by far the longest part of a step: an interrupt within it takes back what was reserved and harms nobody."""
    try:
        return target.forward(batch)
    except BaseException as error:
        for work in works:
            cache.cancel(work.request.sequence)
        if is_interrupt(error):
            raise PassInterrupted from error
        raise


def _settle(work: Work, logits: FloatArray, cache: KVCache, speculator: Speculator) -> Sequence[int]:
    """Walk one request's tree, commit its tokens and keep their rows; returns the plan's nodes that were kept."""
    request, tree = work.request, work.tree
    if work.wants_prompt_rows:
        request.prompt_logprobs.extend(prompt_logprobs(request, logits[: work.num_given]))
        logits = logits[work.root :]
    if tree is None:
        cache.keep_path(request.sequence, work.root)
        cache.remember(request.sequence, request.token_ids, salt=request.salt)
        return range(work.num_given)
    result = speculator.verify(tree, logits, request)
    logprobs = token_logprobs(result, logits, request) if request.params.logprobs is not None else ()
    num_emitted = commit(request, result.token_ids, len(result.accepted_nodes), drafted=tree.num_draft_tokens > 0, logprobs=logprobs)
    accepted = [work.root + node for node in result.accepted_nodes[:num_emitted]]
    cache.keep_path(request.sequence, accepted[-1] if accepted else work.root)
    cache.remember(request.sequence, request.token_ids, salt=request.salt)
    request.stats.record(tree.depths[1:], len(accepted), num_emitted, work.plain)
    if tree.num_draft_tokens > 0:
        speculator.learn(request, tree, result.accepted_nodes)
    return [*range(work.num_given), *accepted]


def _fail(request: Request, error: Exception, cache: KVCache) -> None:
    """End a request with its own error; what a pass with damaged numbers left in the cache is for nobody else."""
    cache.cancel(request.sequence)
    if isinstance(error, CheckpointError):
        cache.forget(request.sequence)
    request.fail(error)


def _features(committed: CommittedRows, rows: Sequence[int], output: ForwardOutput, speculator: Speculator) -> CommittedRows:
    """Add the target activations the drafter asked for."""
    needs = speculator.drafter.needs if speculator.drafter is not None else None
    if needs is None or not (needs.hidden_states or needs.layers):
        return committed
    hidden = output.hidden_states[rows] if needs.hidden_states else None
    collected = output.collected_hidden_states
    return CommittedRows(committed.request, committed.start, len(rows), hidden, None if collected is None else collected[:, rows])

"""One step: guess, check all guesses in one target pass, keep what the target would have said. Start reading here.

    policy.budget  →  drafter.propose  →  cache.reserve  →  one target pass over root + tree of every request
                   →  verify (walk)    →  commit (token by token)  →  cache.keep_path  →  policy and drafter are told

A request whose earlier tokens are not cached yet (a prompt) brings those rows first, in chunks; the chunk that reaches its last
token is the prompt's own plain step. The bonus token stays pending: it is the root of the next step, never a pass of its own.
"""

from collections.abc import Sequence

from paceline.kv_cache.paged import KVCache
from paceline.runtimes.base import FloatArray, ForwardOutput, Runtime, assemble
from paceline.speculation.commit import commit
from paceline.speculation.drafter import CommittedRows
from paceline.speculation.guess import Guesser
from paceline.speculation.request import Request
from paceline.speculation.verify import verify
from paceline.speculation.work import Work, reserve


def step(requests: Sequence[Request], target: Runtime, cache: KVCache, guesser: Guesser, *, chunk_rows: int) -> None:
    """Advance every request by one target pass; each that has reached its last token emits at least one token.

    Args:
        requests: unfinished, each with a sequence in `cache`.
        chunk_rows: prompt rows of one request in one pass.

    Raises:
        CapacityError: not even the plain rows fit; nothing was changed.
        CheckpointError: the target produced NaN.
    """
    works = [Work.of(request, chunk_rows) for request in requests]
    guesser.guess(works)
    plans = reserve(works, cache)
    output = target.forward(assemble(plans, [work.token_ids for work in works], [work.logits_nodes for work in works]))
    committed: list[CommittedRows] = []
    first_row = first_logits_row = 0
    for work, plan in zip(works, plans, strict=True):
        start = work.request.sequence.committed_len
        logits = output.logits[first_logits_row : first_logits_row + len(work.logits_nodes), : guesser.vocab_size]
        kept = _settle(work, logits, cache, guesser)
        rows = [first_row + plan.row_of_node[node] for node in kept]
        committed.append(_features(CommittedRows(work.request, start, len(rows)), rows, output, guesser))
        first_logits_row += len(work.logits_nodes)
        first_row += plan.num_rows
    guesser.observe(committed)


def _settle(work: Work, logits: FloatArray, cache: KVCache, guesser: Guesser) -> Sequence[int]:
    """Walk one request's tree, commit its tokens and keep their rows; returns the plan's nodes that were kept."""
    request, tree = work.request, work.tree
    if tree is None:
        cache.keep_path(request.sequence, work.root)
        return range(work.num_given)
    result = verify(tree, logits, request)
    num_emitted = commit(request, result.token_ids, len(result.accepted_nodes), drafted=tree.num_draft_tokens > 0)
    accepted = [work.root + node for node in result.accepted_nodes[:num_emitted]]
    cache.keep_path(request.sequence, accepted[-1] if accepted else work.root)
    request.stats.record(tree.depths[1:], len(accepted), num_emitted, work.plain)
    if tree.num_draft_tokens > 0:
        guesser.policy.observe(request, tree.num_draft_tokens, len(result.accepted_nodes))
    return [*range(work.num_given), *accepted]


def _features(committed: CommittedRows, rows: Sequence[int], output: ForwardOutput, guesser: Guesser) -> CommittedRows:
    """Add the target activations the drafter asked for."""
    needs = guesser.drafter.needs if guesser.drafter is not None else None
    if needs is None or not (needs.hidden_states or needs.layers):
        return committed
    hidden = output.hidden_states[rows] if needs.hidden_states else None
    collected = output.collected_hidden_states
    return CommittedRows(committed.request, committed.start, len(rows), hidden, None if collected is None else collected[:, rows])

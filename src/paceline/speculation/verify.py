"""The walk: which guesses the target itself would have produced.

At the root the target's own token is drawn from its own row, with the noise of that position. If a child holds it, the walk goes
there and repeats; else it stops and that token is the bonus. It also stops at the token that ends the request: rows behind it are none
that plain decoding reaches. No draft probability is needed and any tree is exact, because every token is the target's own draw
(sample-and-match; deterministic given the seed).
"""

from collections.abc import Sequence
from typing import NamedTuple

from paceline.errors import is_interrupt
from paceline.runtimes.base import FloatArray
from paceline.sampling.logprobs import TokenLogprobs, processed_logprobs, raw_logprobs
from paceline.sampling.path_sampler import LogitsView, PathRequest, SampledPath, sample_paths
from paceline.speculation.ending import LookAhead, goes_on_behind
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree


class VerifyResult(NamedTuple):
    """Outcome of one walk.

    Attributes:
        accepted_nodes: nodes kept, from the root's child down.
        token_ids: the target's tokens: one for each accepted node, then the bonus token.
    """

    accepted_nodes: tuple[int, ...]
    token_ids: tuple[int, ...]

    @property
    def bonus_token_id(self) -> int:
        return self.token_ids[-1]


def walk_together(asked: Sequence[tuple[DraftTree | None, int, Request]], rows: LogitsView) -> Sequence[SampledPath | None]:
    """The walks of several requests, as far as they are drawn at once: `walked` of `verify` for each.

    Args:
        asked: of each the tree, None where nothing is to be walked, and the row of its root.
        rows: of the whole pass.
    """
    requests: list[PathRequest | None] = []
    for tree, first_row, request in asked:
        sampler = request.processor.path_sampler
        if tree is None or sampler is None:
            requests.append(None)
        else:
            position = len(request.token_ids)
            requests.append(PathRequest(sampler, tree.token_ids, tree.parents, request.seed, request.sample_index, position, first_row))
    return sample_paths(requests, rows)


def verify(tree: DraftTree, logits: FloatArray, request: Request, walked: SampledPath | None = None) -> VerifyResult:
    """Walk `tree` with the target's rows.

    Args:
        tree: rooted at the request's last token.
        logits: [N, V] float32, row i belongs to node i; only rows the walk reaches are read.
        request: gives processors, seed and position. Not changed.
        walked: what `walk_together` said of them; None = the rows are drawn from one by one.

    Raises:
        PacelineError: the root's row cannot be drawn from. A row behind it that cannot ends the walk in front of it.
    """
    if walked is not None:
        return _cut_at_end(walked, request)
    ahead, node = LookAhead(request), 0
    accepted: list[int] = []
    path: list[int] = []
    while True:
        try:
            edited = request.processor.edit(logits[node], path)
            token = edited.draw(request.seed, request.sample_index, len(request.token_ids) + len(path))
        except BaseException as error:
            if not accepted or is_interrupt(error):
                raise
            return VerifyResult(tuple(accepted[:-1]), tuple(path))  # what comes before is kept; the next step reaches this row first
        path.append(token)
        child = tree.child(node, token)
        if child is None or ahead.ends_with(token):
            return VerifyResult(tuple(accepted), tuple(path))
        accepted.append(child)
        node = child


def _cut_at_end(path: SampledPath, request: Request) -> VerifyResult:
    """What is left of a path at the token that ends the request."""
    tokens, nodes = path
    count = len(nodes)
    if nodes and not goes_on_behind(request, tokens[:-1]):
        ahead = LookAhead(request)
        count = next((index for index, token in enumerate(tokens[:-1]) if ahead.ends_with(token)), count)
    return VerifyResult(tuple(nodes[:count]), tuple(tokens[: count + 1]))


def token_logprobs(result: VerifyResult, logits: FloatArray, request: Request) -> list[TokenLogprobs]:
    """What the target's own rows say of the tokens of a walk, one for each; to be asked before they are committed.

    Args:
        result, logits, request: of that walk, by whatever rule it chose; `request.params.logprobs` is given.
    """
    num_top = request.params.logprobs or 0
    rows = [logits[node] for node in (0, *result.accepted_nodes)]
    if request.params.logprobs_mode == "raw":
        return [raw_logprobs(row, token, num_top) for row, token in zip(rows, result.token_ids, strict=True)]
    return [
        processed_logprobs(request.processor.process(row, result.token_ids[:depth]), result.token_ids[depth], num_top)
        for depth, row in enumerate(rows)
    ]


def prompt_logprobs(request: Request, logits: FloatArray) -> list[TokenLogprobs | None]:
    """What the target's rows say of the prompt tokens behind them; the first token has no row before it and gets None.

    Args:
        request: its rows from `committed_len` on ran. Rows that ran before (it was preempted since) are passed over.
        logits: [rows, V], of all known tokens of the pass.
    """
    start, num_top = request.sequence.committed_len, request.params.prompt_logprobs or 0
    found: list[TokenLogprobs | None] = [] if request.prompt_logprobs else [None]
    first = len(request.prompt_logprobs) + len(found)
    for index in range(max(first, start + 1), min(start + len(logits) + 1, request.num_prompt_tokens)):
        found.append(raw_logprobs(logits[index - 1 - start], request.token_ids[index], num_top))
    return found

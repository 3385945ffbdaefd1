"""Simulated seconds of every fixed draft length, computed without the engine's data structures.

`replay.best_fixed` defines the result; a test compares the two. This version is about ten times as fast, because what becomes of the draft
at each position is computed once for a draft length, whatever the batch and the costs.
"""

from collections.abc import Sequence
from itertools import compress

from harness.replay import DEEPEST, Costs, Trace
from paceline.speculation.tree import DraftTree

_Drafts = tuple[list[int], list[int], list[int]]
"""By position: draft tokens, their depth, and how many are accepted."""


def fixed_lengths(traces: Sequence[Trace], costs: Costs, *, batch_size: int = 1, deepest: int = DEEPEST) -> list[float]:
    """Return the seconds that all texts take with each fixed draft length from 0 (plain decoding) to `deepest`.

    Args:
        batch_size: number of texts that run at the same time.
    """
    pass_s = [0.0, *(costs.pass_s(rows) for rows in range(1, batch_size * (deepest + 1) + 1))]
    whole = [[_right_tokens(tree, trace.token_ids, at) for at, tree in enumerate(trace.guesses)] for trace in traces]
    found = []
    for length in range(deepest + 1):
        texts = [_drafts(trace, right, length) for trace, right in zip(traces, whole, strict=True)]
        found.append(_seconds(texts, costs, pass_s, batch_size, length))
    return found


def _right_tokens(tree: DraftTree | None, token_ids: Sequence[int], position: int) -> int:
    """The number of draft tokens on the path of the text."""
    node, count = 0, 0
    for token in token_ids[position:] if tree is not None else ():
        child = tree.child(node, token)
        if child is None:
            break
        node, count = child, count + 1
    return count


def _drafts(trace: Trace, right: Sequence[int], length: int) -> _Drafts:
    sizes, depths, accepted = list[int](), list[int](), list[int]()
    for position, (tree, num_right) in enumerate(zip(trace.guesses, right, strict=True)):
        depth = min(length, len(trace.token_ids) - position - 1)
        if tree is None or depth <= 0:
            size = depth = num_right = 0
        elif tree.tree_depth == len(tree.token_ids) - 1:  # a chain
            size = depth = min(depth, tree.tree_depth)
        else:
            tree = tree.trim(vocab_size=2**31, max_depth=depth, max_rows=length + 1)
            size, depth, num_right = tree.num_draft_tokens, tree.tree_depth, _right_tokens(tree, trace.token_ids, position)
        sizes.append(size)
        depths.append(depth)
        accepted.append(min(depth, num_right))
    return sizes, depths, accepted


def _seconds(texts: Sequence[_Drafts], costs: Costs, pass_s: Sequence[float], batch_size: int, length: int) -> float:
    waiting, running, positions = list(reversed(texts)), list[_Drafts](), list[int]()
    seconds = 0.0
    while waiting or running:
        while waiting and len(running) < batch_size:
            running.append(waiting.pop())
            positions.append(0)
        num_drafted, deepest, has_drafted, has_ended = 0, 0, False, False
        for index, (sizes, depths, accepted) in enumerate(running):
            position, last = positions[index], len(sizes) - 1
            num_drafted += sizes[position]
            deepest = max(deepest, depths[position])
            has_drafted = has_drafted or position < last
            positions[index] = position = position + accepted[position] + 1
            has_ended = has_ended or position > last
        seconds += pass_s[len(running) + num_drafted] + costs.host_s[0] * len(running) + costs.host_s[1] * num_drafted
        if has_drafted and length > 0:
            seconds += costs.draft_s[0] + costs.draft_s[1] * deepest
        if has_ended:
            is_kept = [positions[index] < len(text[0]) for index, text in enumerate(running)]
            running, positions = list(compress(running, is_kept)), list(compress(positions, is_kept))
    return seconds

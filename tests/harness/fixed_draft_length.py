"""Simulated seconds of every fixed draft length, computed without the engine's data structures.

`replay.best_fixed` defines the result; a test compares the two. This version is about ten times as fast, because the number of
accepted tokens at each position is computed once for all draft lengths. It takes chains only, not trees with branches.
"""

from collections.abc import Sequence

from harness.replay import DEEPEST, Costs, Trace


def fixed_length_seconds(traces: Sequence[Trace], costs: Costs, *, batch_size: int = 1, deepest: int = DEEPEST) -> list[float]:
    """Return the seconds of each fixed draft length from 0 (plain decoding) to `deepest`.

    Args:
        batch_size: number of texts that run at the same time.
    """
    texts = [_acceptance(trace) for trace in traces]
    most_rows = batch_size * (deepest + 1)
    pass_s = [0.0, *(costs.pass_s(rows) for rows in range(1, most_rows + 1))]
    return [_seconds(texts, costs, pass_s, batch_size, length) for length in range(deepest + 1)]


def _acceptance(trace: Trace) -> tuple[list[int], list[int]]:
    """The number of draft tokens at each position, and how many of the first ones are right."""
    drafted, right = [], []
    for position, tree in enumerate(trace.guesses):
        if tree is None:
            drafted.append(0)
            right.append(0)
            continue
        if list(tree.parents) != list(range(-1, len(tree.parents) - 1)):
            raise ValueError("a draft with branches: use replay.best_fixed")
        count = 0
        for draft_token, token in zip(tree.token_ids[1:], trace.token_ids[position:], strict=False):
            if draft_token != token:
                break
            count += 1
        drafted.append(len(tree.token_ids) - 1)
        right.append(count)
    return drafted, right


def _seconds(texts: Sequence[tuple[list[int], list[int]]], costs: Costs, pass_s: Sequence[float], batch_size: int, length: int) -> float:
    waiting, positions, running = list(reversed(texts)), list[int](), list[tuple[list[int], list[int]]]()
    seconds = 0.0
    while waiting or running:
        while waiting and len(running) < batch_size:
            running.append(waiting.pop())
            positions.append(0)
        num_drafted = depth = num_done = 0
        is_asked = False
        for index, (drafted, right) in enumerate(running):
            position = positions[index]
            remaining = len(drafted) - position
            limit = min(length, remaining - 1)
            count = 0
            if limit > 0:
                is_asked = True
                count = min(limit, drafted[position])
                num_drafted += count
                depth = max(depth, count)
            accepted = min(count, right[position])
            positions[index] = position + accepted + 1
            num_done += remaining == accepted + 1
        num_rows = len(running) + num_drafted
        seconds += pass_s[num_rows] + costs.host_s[0] * len(running) + costs.host_s[1] * num_drafted
        if is_asked:
            seconds += costs.draft_s[0] + costs.draft_s[1] * depth
        if num_done:
            kept = [index for index, (drafted, _) in enumerate(running) if positions[index] < len(drafted)]
            running, positions = [running[index] for index in kept], [positions[index] for index in kept]
    return seconds

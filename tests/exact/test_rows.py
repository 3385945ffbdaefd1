"""Promise 1 at its root: a row's logits are the same bits whatever else is in the pass.

The reference is plain decoding: one sequence alone, one row a pass. Compared with it are random mixes of decode rows, rows of drafts and
prompt chunks of one to six sequences, and trees.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from harness.exact_targets import EVERYTHING, is_in_a_normal_run, skip_without_kernels
from harness.planted_faults import leave_kept_rows_of_a_tree_where_they_were
from paceline.kv_cache import cache as cache_module
from paceline.kv_cache.cache import CachedSequence, KVCache
from paceline.kv_cache.row_plan import RowPlan, path_to
from paceline.models.config import WeightType
from paceline.runtimes.base import FloatArray, ForwardBatch, LogitsRows, Network, Numerics, assemble_pass
from paceline.runtimes.load import RuntimeOptions, load_network
from paceline.runtimes.native.passes import PassRecord

NUM_SEQUENCES = 6
Directory = Callable[[str], Path]
Work = tuple[CachedSequence, Sequence[int], Sequence[int]]  # sequence, parents, token of each node


@dataclass
class Subject:
    """A runtime, its cache, token sequences and the reference logits of each of their positions."""

    runtime: Network
    cache: KVCache
    token_ids: list[list[int]]
    solo: list[list[FloatArray]]


def open_target(directory: Path, dtype: str, collect_layers: Sequence[int] = ()) -> Network:
    skip_without_kernels()
    options = RuntimeOptions(
        numerics=Numerics.EXACT, dtype=WeightType(dtype), num_threads=2, max_model_len=512, backend="native", collect_layers=collect_layers
    )
    runtime = load_network(directory, options).network
    assert runtime.capabilities.numerics is Numerics.EXACT
    return runtime


def run(runtime: Network, cache: KVCache, work: Sequence[Work]) -> list[FloatArray]:
    """One pass over the work and the logits of all nodes of each."""
    plans = [cache.reserve_rows(sequence, parents) for sequence, parents, _ in work]
    output = runtime.forward(*assemble_pass(plans, [tokens for _, _, tokens in work], [range(len(parents)) for _, parents, _ in work]))
    bounds = np.cumsum([0, *(len(parents) for _, parents, _ in work)])
    return [output.logits[start:end].copy() for start, end in pairwise(bounds)]


def decode_alone(runtime: Network, cache: KVCache, token_ids: Sequence[int]) -> list[FloatArray]:
    sequence = cache.new_sequence()
    rows = []
    for token in token_ids:
        rows.append(run(runtime, cache, [(sequence, range(-1, 0), [token])])[0][0])
        cache.keep_path(sequence, 0)
    cache.release_sequence(sequence)
    return rows


def make_subject(directory: Path, dtype: str, length: int, seed: int) -> Subject:
    runtime = open_target(directory, dtype)
    random = np.random.default_rng(seed)
    token_ids = [random.integers(0, runtime.config.vocab_size, length).tolist() for _ in range(NUM_SEQUENCES)]
    cache = runtime.new_cache(200)
    return Subject(runtime, cache, token_ids, [decode_alone(runtime, cache, ids) for ids in token_ids])


def mixed_passes(subject: Subject, random: np.random.Generator) -> Iterator[tuple[int, int]]:
    """Run all sequences to their end in random mixes; yields (rows compared, rows that differ) of each pass."""
    cache = subject.cache
    sequences = [cache.new_sequence() for _ in subject.token_ids]
    while live := [i for i, ids in enumerate(subject.token_ids) if sequences[i].committed_len < len(ids)]:
        picked = random.permutation(live)[: random.integers(1, len(live) + 1)].tolist()
        work = []
        for index in picked:
            start = sequences[index].committed_len
            count = min(int(random.choice([1, 1, 2, 3, 5, 8, 13, 33, 64])), len(subject.token_ids[index]) - start)
            work.append((sequences[index], range(-1, count - 1), subject.token_ids[index][start : start + count]))
        logits = run(subject.runtime, cache, work)
        differing = 0
        for index, rows, (sequence, parents, _) in zip(picked, logits, work, strict=True):
            start = sequence.committed_len
            differing += sum(not np.array_equal(row, subject.solo[index][start + i]) for i, row in enumerate(rows))
            cache.keep_path(sequence, len(parents) - 1)
        yield sum(map(len, logits)), differing
    for sequence in sequences:
        cache.release_sequence(sequence)
    cache.check_consistency()


def compare_mixes(subject: Subject, seed: int, repeats: int) -> tuple[int, int]:
    random = np.random.default_rng(seed)
    counts = [count for _ in range(repeats) for count in mixed_passes(subject, random)]
    return sum(rows for rows, _ in counts), sum(differing for _, differing in counts)


def compare_trees(subject: Subject, seed: int, num_trees: int) -> tuple[int, int]:
    """Random trees after random prefixes, committed along a random path and continued; every node against decoding its path alone."""
    random = np.random.default_rng(seed)
    runtime, cache = subject.runtime, subject.cache
    rows = differing = 0
    for _ in range(num_trees):
        index = int(random.integers(NUM_SEQUENCES))
        prefix = subject.token_ids[index][: int(random.integers(1, 70))]
        sequence = cache.new_sequence()
        run(runtime, cache, [(sequence, range(-1, len(prefix) - 1), prefix)])
        cache.keep_path(sequence, len(prefix) - 1)
        for _ in range(2):  # the second tree grows after what the first one committed
            size = int(random.integers(2, 13))
            parents = [-1, *sorted(int(random.integers(0, node)) for node in range(1, size))]
            tokens = random.integers(0, runtime.config.vocab_size, size).tolist()
            base = list(prefix)
            (logits,) = run(runtime, cache, [(sequence, parents, tokens)])
            for node in range(size):
                path = [tokens[step] for step in path_to(parents, node)]
                expected = solo_row(subject, base, path)
                rows += 1
                differing += not np.array_equal(logits[node], expected)
            kept = int(random.integers(0, size))
            cache.keep_path(sequence, kept)
            prefix = [*base, *(tokens[step] for step in path_to(parents, kept))]
        cache.release_sequence(sequence)
    cache.check_consistency()
    return rows, differing


def solo_row(subject: Subject, prefix: Sequence[int], path: Sequence[int]) -> FloatArray:
    """Logits of the last token of prefix + path, the path decoded row by row alone."""
    sequence = subject.cache.new_sequence()
    run(subject.runtime, subject.cache, [(sequence, range(-1, len(prefix) - 1), prefix)])
    subject.cache.keep_path(sequence, len(prefix) - 1)
    for token in path:
        row = run(subject.runtime, subject.cache, [(sequence, range(-1, 0), [token])])[0][0]
        subject.cache.keep_path(sequence, 0)
    subject.cache.release_sequence(sequence)
    return row


@pytest.fixture(scope="module", params=EVERYTHING, ids="-".join)
def subject(request: pytest.FixtureRequest, checkpoint: Directory, large_counts: bool, seed: int) -> Subject:
    name, dtype = request.param
    if not large_counts and not is_in_a_normal_run(*request.param):
        pytest.skip("left to make test-long")
    length = 300 if large_counts else 44 if name == "mini" else 70
    return make_subject(checkpoint(name), dtype, length, seed)


def test_row_is_independent_of_the_rest_of_the_pass(subject: Subject, large_counts: bool, seed: int, tally: "Counter[str]") -> None:
    rows, differing = compare_mixes(subject, seed, repeats=8 if large_counts else 1)
    tally["rows of mixed passes compared bit by bit with solo decoding"] += rows
    assert differing == 0
    assert rows >= (14_000 if large_counts else 200)


def test_tree_rows_equal_their_paths_decoded_alone_bit_by_bit(
    subject: Subject, large_counts: bool, seed: int, tally: "Counter[str]"
) -> None:
    rows, differing = compare_trees(subject, seed, num_trees=40 if large_counts else 2)
    tally["rows of trees compared bit by bit with solo decoding"] += rows
    assert differing == 0
    assert rows > 0


@pytest.mark.parametrize(("name", "dtype"), EVERYTHING)
def test_collecting_hidden_states_changes_no_bit_of_the_logits(
    checkpoint: Directory, large_counts: bool, name: str, dtype: str, seed: int
) -> None:
    if not large_counts and not is_in_a_normal_run(name, dtype):
        pytest.skip("left to make test-long")
    plain = open_target(checkpoint(name), dtype)
    layers = (0, 1, plain.config.num_layers)
    collecting = open_target(checkpoint(name), dtype, layers)
    tokens = np.random.default_rng(seed).integers(0, plain.config.vocab_size, 24).tolist()
    one, other = (decode_alone(runtime, runtime.new_cache(4), tokens) for runtime in (plain, collecting))
    assert all(np.array_equal(row, twin) for row, twin in zip(one, other, strict=True))


# Planted faults: each must be seen by the comparisons above.


@pytest.fixture(scope="module")
def small_subject(checkpoint: Directory, seed: int) -> Subject:
    return make_subject(checkpoint("llama"), "f32", 80, seed)


def ignore_tree_masks(patch: pytest.MonkeyPatch) -> None:
    real = cache_module.plan_rows
    patch.setattr(cache_module, "plan_rows", lambda *args: replace(real(*args), mask=None))


def keep_the_row_of_the_parent(patch: pytest.MonkeyPatch) -> None:
    real = RowPlan.committed_path
    patch.setattr(RowPlan, "committed_path", lambda plan, node: real(plan, max(0, plan.parents[node])))


@pytest.mark.parametrize(
    ("plant", "num_trees"),
    [(ignore_tree_masks, 4), (keep_the_row_of_the_parent, 4), (leave_kept_rows_of_a_tree_where_they_were, 8)],
)
def test_planted_faults_of_tree_rows_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], num_trees: int, small_subject: Subject, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert compare_trees(small_subject, seed, num_trees)[1] > 0


def test_fault_of_keys_written_to_blocks_of_another_sequence_is_found(
    small_subject: Subject, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last sequence of a pass writes and reads in the blocks of the first."""
    real = PassRecord.fill

    def misplaced(memory: PassRecord, batch: ForwardBatch, wanted: LogitsRows) -> None:
        real(memory, batch, wanted)
        memory.ranges[len(batch.ranges) - 1, 3] = memory.ranges[0, 3]

    monkeypatch.setattr(PassRecord, "fill", misplaced)
    assert compare_mixes(small_subject, seed, repeats=1)[1] > 0

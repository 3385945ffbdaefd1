"""Layers with a window: whatever happened before, the rows that the next one sees are there, and no more than that is held for long."""

from collections.abc import Sequence

import numpy as np
import pytest

from harness.layer_caches import check_window
from paceline.errors import CapacityError
from paceline.kv_cache import sliding_window as module
from paceline.kv_cache.block_pool import BlockPool
from paceline.kv_cache.cache import CachedSequence, KVCache
from paceline.kv_cache.full_attention import FullAttentionCache
from paceline.kv_cache.row_plan import num_blocks_for, path_to
from paceline.kv_cache.sliding_window import PassLimits, SlidingWindowCache, num_window_blocks

SIZE = 4
NUM_BLOCKS = 24
WINDOWS = (1, 4, 7)
TRUNCATION_SLACK_ROWS = 3


@pytest.fixture(autouse=True)
def kept_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRUNCATION_SLACK_ROWS", TRUNCATION_SLACK_ROWS)


class Text:
    """A sequence and its tokens; the last one is never cached."""

    def __init__(self, sequence: CachedSequence, token_ids: Sequence[int]) -> None:
        self.sequence, self.token_ids = sequence, list(token_ids)
        self.drafted: list[int] = []


def num_held(window: SlidingWindowCache, sequence_id: int) -> int:
    """Blocks that a sequence owns."""
    table = window._tables.get(sequence_id)
    return 0 if table is None else table.end - table.first


class Bench:
    """A cache with a memory for everything and one for each window; a row is labelled by all tokens up to it."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, of_windows: int | None = None, limits: PassLimits | None = None) -> None:
        counts = [of_windows or num_window_blocks(window, num_blocks, limits, SIZE) for window in WINDOWS]
        self.windows = [SlidingWindowCache(self._storage(count), window, SIZE) for window, count in zip(WINDOWS, counts, strict=True)]
        self.limits = limits or PassLimits(6, 1_000_000)
        self.cache = KVCache([FullAttentionCache(self._storage(num_blocks)), *self.windows], num_blocks, block_size=SIZE)
        self.texts: list[Text] = []
        self.num_adopted = 0
        self._labels: dict[tuple[int, ...], int] = {}

    @staticmethod
    def _storage(num_blocks: int) -> np.ndarray:
        return np.zeros((2, num_blocks, 1, SIZE, 1), np.int64)

    def start(self, token_ids: Sequence[int]) -> Text:
        text = Text(self.cache.new_sequence(), token_ids)
        self.texts.append(text)
        self.num_adopted += self.cache.match_prefix(text.sequence, token_ids)
        return text

    def run(self, text: Text, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """As a pass: rows are written to their slots, in the blocks that each memory names."""
        sequence, start = text.sequence, text.sequence.committed_len
        plan = self.cache.reserve_rows(sequence, parents)
        text.drafted = list(tokens)
        tables = [list(plan.block_table), *(window.block_table(sequence.id) for window in self.windows)]
        for memory, table in zip(self.cache.layer_caches, tables, strict=True):
            for node in range(plan.num_rows):
                slot, before = start + node, [tokens[one] for one in path_to(parents, node)]
                memory.storage[:, table[slot // SIZE], :, slot % SIZE] = self._label([*text.token_ids[:start], *before])

    def keep(self, text: Text, node: int) -> None:
        start, plan = text.sequence.committed_len, text.sequence.row_plan
        assert plan is not None
        kept = [text.drafted[one] for one in path_to(plan.parents, node)]
        self.cache.keep_path(text.sequence, node)
        text.token_ids[start : start + len(kept)] = kept
        if len(text.token_ids) == text.sequence.committed_len:
            text.token_ids.append(len(text.token_ids) % 2)
        self.cache.register_prefix(text.sequence, text.token_ids)

    def prompt(self, token_ids: Sequence[int]) -> Text:
        """A text whose rows have run, two blocks a pass."""
        text = self.start(token_ids)
        while rest := text.token_ids[text.sequence.committed_len : -1][: 2 * SIZE]:
            self.run(text, range(-1, len(rest) - 1), rest)
            self.keep(text, len(rest) - 1)
            self.check()
        return text

    def truncate(self, text: Text, length: int) -> int:
        kept = self.cache.truncate(text.sequence, length)
        text.token_ids[kept:] = [len(text.token_ids) % 3]
        return kept

    def has_room(self, num_rows: int) -> bool:
        """Whether this many rows fit in addition to those that run."""
        plans = [text.sequence.row_plan for text in self.texts]
        return num_rows + sum(len(plan.parents) for plan in plans if plan is not None) <= self.limits.max_pass_rows

    def release(self, text: Text) -> None:
        self.cache.release_sequence(text.sequence)
        self.texts.remove(text)

    def check(self) -> None:
        """What the next row sees is there; between passes nothing farther back is held."""
        self.cache.check_consistency()
        for window in self.windows:
            check_window(window)
            for text in self.texts:
                length = text.sequence.committed_len
                first = max(0, length - window.window + 1)
                for slot in range(first, length):
                    table = window.block_table(text.sequence.id)
                    rows = window.storage[:, table[slot // SIZE], 0, slot % SIZE, 0]
                    assert rows.tolist() == [self._label(text.token_ids[: slot + 1])] * 2, (window.window, slot, length)
                if text.sequence.row_plan is None:
                    assert num_held(window, text.sequence.id) <= num_blocks_for(window.window - 1 + TRUNCATION_SLACK_ROWS, SIZE) + 1

    def _label(self, token_ids: Sequence[int]) -> int:
        return self._labels.setdefault(tuple(token_ids), len(self._labels) + 1)


def random_event(bench: Bench, generator: np.random.Generator) -> None:
    if not bench.texts or (len(bench.texts) < bench.limits.max_sequences and generator.random() < 0.12):
        bases = [text.token_ids for text in bench.texts] + [[base] * 40 for base in range(3)]
        base = bases[int(generator.integers(len(bases)))]
        bench.start([*base[: int(generator.integers(0, 41))], *generator.integers(0, 2, int(generator.integers(1, 8))).tolist()])
        return
    text = bench.texts[int(generator.integers(len(bench.texts)))]
    draw, plan, rest = generator.random(), text.sequence.row_plan, text.token_ids[text.sequence.committed_len :]
    if draw < 0.8 and plan is not None:
        bench.keep(text, len(plan.parents) - 1 if len(rest) > 1 else int(generator.integers(len(plan.parents))))
    elif draw < 0.8 and len(rest) > 1:
        count = int(generator.integers(1, len(rest) + 1))
        if not bench.has_room(count):
            return
        bench.run(text, range(-1, count - 1), rest[:count])
    elif draw < 0.8:
        parents = [-1, *(int(generator.integers(max(0, node - 3), node)) for node in range(1, int(generator.integers(1, 10))))]
        if not bench.has_room(len(parents)):
            return
        bench.run(text, parents, [*rest, *generator.integers(0, 3, len(parents) - 1).tolist()])
    elif draw < 0.83:
        bench.cache.drop_reserved_rows(text.sequence)
    elif draw < 0.9:
        length = int(generator.integers(text.sequence.committed_len + 1))
        assert bench.truncate(text, length) <= length
    elif draw < 0.92:
        bench.cache.unregister_prefix(text.sequence)
    else:
        bench.release(text)


def run_events(seed: int, num_schedules: int, num_blocks: int = NUM_BLOCKS, limits: PassLimits | None = None) -> tuple[int, int]:
    """Return the number of matched rows, and how often the cache had no room."""
    num_adopted, refused = 0, list[str]()
    for schedule in range(num_schedules):
        generator, bench = np.random.default_rng([seed, schedule]), Bench(num_blocks, limits=limits)
        free = [window.pool.num_free for window in bench.windows]
        for _ in range(200):
            try:
                random_event(bench, generator)
            except CapacityError as error:
                refused.append(str(error))
            bench.check()
        for text in list(bench.texts):
            bench.release(text)
        bench.check()
        assert [window.pool.num_free for window in bench.windows] == free
        bench.cache.pool.release(bench.cache.pool.allocate(num_blocks))  # evicts everything
        assert [len(window.pool._free) for window in bench.windows] == free
        num_adopted += bench.num_adopted
    assert not any("window" in error for error in refused)
    return num_adopted, len(refused)


def test_windowed_cache_shows_the_right_rows_under_random_use(seed: int, large_counts: bool, tally: "dict[str, int]") -> None:
    num_schedules = 400 if large_counts else 12
    num_adopted, num_refused = run_events(seed, num_schedules)
    tally["events of caches with windows"] += 200 * num_schedules
    assert min(num_adopted, num_refused) > num_schedules


@pytest.mark.spread(0.3)
@pytest.mark.parametrize("limits", [PassLimits(1, 6), PassLimits(3, 10), PassLimits(5, 40)], ids=str)
def test_load_within_limits_never_runs_out_of_window_blocks(limits: PassLimits, seed: int, large_counts: bool) -> None:
    """A cache of many blocks, of windows as few as were counted for so many sequences and rows."""
    num_schedules = 300 if large_counts else 10
    num_adopted, num_refused = run_events(seed, num_schedules, num_blocks=400, limits=limits)
    assert (num_adopted > num_schedules, num_refused) == (True, 0)


def one_less(real):
    return lambda memory, length: real(memory, length + SIZE)


BROKEN = {
    "a block of the window given back": ("_first_visible_block", one_less),
    "moves within the window left out": (
        "keep_path", lambda real: lambda memory, plan, commit: real(memory, plan, commit._replace(moves=()))
    ),
    "what was forgotten adopted": ("evict", lambda real: lambda cache, block_hash: None),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_random_windowed_cache_use_detects_planted_faults(fault: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name, spoil = BROKEN[fault]
    monkeypatch.setattr(SlidingWindowCache, name, spoil(getattr(SlidingWindowCache, name)))
    with pytest.raises((AssertionError, IndexError, KeyError, RuntimeError)):
        run_events(seed, 12)


def test_truncate_within_a_shared_window_block_copies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_and_go_on(bench: Bench) -> None:
        text, _ = bench.prompt(range(14)), bench.prompt([*range(12), 99])
        bench.truncate(text, 11)
        bench.run(text, [-1], text.token_ids[11:])
        bench.keep(text, 0)
        bench.check()

    cut_and_go_on(Bench())
    monkeypatch.setattr(SlidingWindowCache, "_make_last_writable", lambda memory, table: None)
    with pytest.raises(AssertionError):
        cut_and_go_on(Bench())


def test_prefix_hit_ends_where_its_window_is_stored() -> None:
    bench = Bench(num_blocks=80, of_windows=6)
    long = [5, *range(60), 7]
    bench.release(bench.prompt(long))
    end, middle = bench.cache.new_sequence(), bench.cache.new_sequence()
    assert bench.cache.cached_prefix_len(end, long) == 60, "its last blocks were given back last"
    assert bench.cache.cached_prefix_len(middle, [*long[:30], 1]) == 0, "those of the beginning were taken by the end"
    assert bench.cache.match_prefix(end, long) == 60
    assert [num_held(window, end.id) for window in bench.windows] == [0, 1, 2]
    text = Text(end, long)
    bench.texts.append(text)
    bench.check()


@pytest.mark.parametrize("num_before", range(6))
def test_interrupted_release_never_frees_an_owned_block(num_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after any of the calls that free blocks: some may be lost, none may be free and owned."""
    bench, real, calls = Bench(), BlockPool.release, iter(range(num_before))

    def interrupted(pool: BlockPool, blocks: Sequence[int]) -> None:
        real(pool, blocks)
        if next(calls, None) is None:
            raise KeyboardInterrupt

    def run_all(text: Text) -> None:
        for _ in range(3):
            start = text.sequence.committed_len
            bench.run(text, range(-1, 8), text.token_ids[start : start + 9])
            bench.keep(text, 8)

    text = bench.start([*range(30), 1])
    with monkeypatch.context() as patch:
        patch.setattr(BlockPool, "release", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_all(text)
    bench.cache.release_sequence(text.sequence)
    for pool in (window.pool for window in bench.windows):
        unowned = [*pool._free, *pool._idle]
        assert len(unowned) == len({*unowned})
        assert all(pool._owners[block] == 0 for block in unowned)
        assert min(pool._owners) >= 0


def test_windowed_cache_reserve_without_free_blocks_changes_nothing() -> None:
    bench = Bench(of_windows=2)
    text = bench.start(range(20))
    with pytest.raises(CapacityError, match="3 blocks needed, 2 of 2 free"):
        bench.run(text, range(-1, 9), range(10))
    assert (text.sequence.row_plan, bench.cache.pool.num_free) == (None, NUM_BLOCKS)
    bench.run(text, range(-1, 7), range(8))
    bench.keep(text, 7)
    bench.check()


def test_num_window_blocks_is_bounded_by_the_limits() -> None:
    limits = PassLimits(max_sequences=2, max_pass_rows=16)
    assert num_window_blocks(9, 1000, limits, SIZE) == 2 * (3 + 2 + 1) + 4
    assert num_window_blocks(9, 10, limits, SIZE) == num_window_blocks(9, 10, None, SIZE) == 10

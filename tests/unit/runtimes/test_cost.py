"""Times of passes, on a clock that the passes themselves drive."""

from types import SimpleNamespace

import pytest

from paceline.kv_cache.cache import KVCache
from paceline.runtimes import cost
from paceline.runtimes.base import ForwardBatch, IntArray, LogitsRows
from paceline.runtimes.cost import MIN_RELATIVE_ROW_COST, ForwardProfile

STAIRS = ForwardProfile.from_samples({1: 1.0, 8: 1.2, 9: 2.0, 16: 2.2})


@pytest.mark.parametrize(("rows", "seconds"), [(1, 1.0), (8, 1.2), (9, 2.0), (12, 2.0857), (16, 2.2), (23, 2.4)])
def test_forward_profile_between_measured_counts_is_linear(rows: int, seconds: float) -> None:
    assert STAIRS.seconds_at(rows) == pytest.approx(seconds, abs=1e-3)


def test_profile_of_a_disturbed_pass_is_bounded_by_larger_passes() -> None:
    profile = ForwardProfile.from_samples({1: 1.0, 2: 9.0, 4: 1.3, 8: 1.2})
    assert profile.seconds == {1: 1.0, 2: 1.2, 4: 1.2, 8: 1.2}


def test_profile_of_equal_times_grows_a_little_with_the_rows() -> None:
    profile = ForwardProfile.from_samples({1: 0.9, 5: 0.8, 9: 0.8, 17: 1.2})
    assert profile.seconds == pytest.approx(
        {1: 0.8, 5: 0.8 * (1 + 4 * MIN_RELATIVE_ROW_COST), 9: 0.8 * (1 + 8 * MIN_RELATIVE_ROW_COST), 17: 1.2}
    )


def test_profile_of_one_row_count_is_constant() -> None:
    assert ForwardProfile.from_samples({1: 1.0}).seconds_at(7) == 1.0


def test_cache_read_time_is_per_sequence_and_per_row() -> None:
    assert ForwardProfile.from_samples({1: 1.0, 8: 1.2}, 0.001, 0.0001).attention_s(1000, 8) == pytest.approx(1.0 + 0.8)


def test_profile_json_round_trip_and_invalid_json_is_none() -> None:
    profile = ForwardProfile.from_samples({1: 1.0, 8: 1.2}, 0.001, 0.0001)
    assert ForwardProfile.from_json(profile.as_json()) == profile
    for kept in (None, 3, {}, {"seconds": {"1": 1.0}}, {"seconds": {"1": "x"}, "sequence_s": 0, "row_s": 0}, {"seconds": [], "row_s": 0}):
        assert ForwardProfile.from_json(kept) is None
    assert ForwardProfile.from_json({"seconds": {"1": -1.0, "2": 1.0}, "sequence_s": 0, "row_s": 0}) is None


class ClockedRuntime:
    """A pass takes 1 s and a tenth for each row; the passes in `slow` take a minute more."""

    def __init__(self, slow: tuple[int, ...] = ()) -> None:
        self.now = 0.0
        self.config = SimpleNamespace(vocab_size=50)
        self.num_passes, self.row_s = 7, 0.1  # those of others
        self.batches: list[ForwardBatch] = []
        self.wanted: list[IntArray] = []
        self._slow = slow

    def forward(self, inputs: object, batch: ForwardBatch, wanted: LogitsRows) -> None:
        self.now += 1.0 + self.row_s * len(batch.positions) + 60.0 * (len(self.batches) in self._slow)
        self.batches.append(batch)
        self.wanted.append(wanted.rows)
        self.num_passes += 1

    def perf_counter(self) -> float:
        return self.now


def make_cache(num_blocks: int = 8) -> KVCache:
    return KVCache([], num_blocks)


def measure(runtime: ClockedRuntime, cache: KVCache, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, **options: int) -> dict:
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=runtime.perf_counter))
    return cost.time_passes(runtime, cache, counts, **{"max_model_len": 512, **options})  # type: ignore[arg-type]


def test_forward_profile_measures_passes_that_follow_cached_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, cache = ClockedRuntime(), make_cache()
    times = measure(runtime, cache, (1, 5), monkeypatch, num_rounds=3)
    assert times == {1: pytest.approx(1.1), 5: pytest.approx(1.5)}
    first, *rest = runtime.batches
    assert len(first.positions) == 64
    assert [len(batch.positions) for batch in rest] == [1, 5] * 4
    assert all(batch.ranges[0].cached_len == 64 for batch in rest)
    cache.check_consistency()
    assert cache.pool.num_free == 8
    assert runtime.num_passes == 7, "they are nobody's"


@pytest.mark.parametrize("with_logits", [True, False])
def test_profiled_passes_compute_logits_of_all_rows_or_of_none(with_logits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = ClockedRuntime()
    measure(runtime, make_cache(), (5,), monkeypatch, num_rounds=1, with_logits=with_logits)
    assert {len(rows) / len(batch.positions) for rows, batch in zip(runtime.wanted, runtime.batches, strict=True)} == {float(with_logits)}


def test_profile_ignores_slow_first_passes_and_disturbances(monkeypatch: pytest.MonkeyPatch) -> None:
    times = measure(ClockedRuntime(slow=(0, 1, 2, 5, 8)), make_cache(), (1, 5), monkeypatch, num_rounds=5)
    assert times == {1: pytest.approx(1.1), 5: pytest.approx(1.5)}


@pytest.mark.parametrize("count", [1, 5, 30, 65])
@pytest.mark.parametrize(("max_model_len", "num_blocks"), [(2, 8), (10, 8), (40, 8), (512, 2), (512, 3), (512, 4)])
def test_profiled_rows_stay_within_the_context_and_the_cache(
    count: int, max_model_len: int, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, cache = ClockedRuntime(), make_cache(num_blocks)
    times = measure(runtime, cache, (1, count), monkeypatch, max_model_len=max_model_len, num_rounds=1)
    assert set(times) == {1, count}
    assert max(int(batch.positions.max()) for batch in runtime.batches) < min(max_model_len, cache.max_slots)
    assert min(times.values()) > 1
    assert cache.pool.num_free == num_blocks


def test_failing_profile_pass_leaves_the_cache_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, cache = ClockedRuntime(), make_cache()
    monkeypatch.setattr(runtime, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measure(runtime, cache, (1, 5), monkeypatch)
    cache.check_consistency()
    assert cache.pool.num_free == 8


class Tables:
    """What is kept between runs."""

    def __init__(self) -> None:
        self.kept: dict[str, object] = {}

    def get(self, key: str) -> object:
        return self.kept.get(key)

    def put(self, key: str, value: object) -> None:
        self.kept[key] = value


def table_of(runtime: ClockedRuntime, facts: Tables, monkeypatch: pytest.MonkeyPatch) -> ForwardProfile:
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=runtime.perf_counter))
    runtime.capabilities, runtime.execution_key = "int8", "1"  # type: ignore[attr-defined]
    return cost.profile_forward(runtime, make_cache(64), facts, max_model_len=512)  # type: ignore[arg-type]


def test_stored_profile_is_reused_after_three_check_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    facts, first, second = Tables(), ClockedRuntime(), ClockedRuntime()
    table = table_of(first, facts, monkeypatch)
    assert table.seconds_at(1) == pytest.approx(1.1)
    assert table.seconds_at(9) == pytest.approx(1.9)
    assert table_of(second, facts, monkeypatch) == table
    assert [len(batch.positions) for batch in second.batches] == [64, *[1, 8, 16] * 2], "cached rows, then a round that warms up"


def test_stored_profile_unlike_the_check_passes_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Tables()
    table_of(ClockedRuntime(), facts, monkeypatch)
    slower = ClockedRuntime()
    slower.row_s = 0.2
    assert table_of(slower, facts, monkeypatch).seconds_at(9) == pytest.approx(2.8)
    ((kept,),) = [tuple(facts.kept.values())]
    assert ForwardProfile.from_json(kept).seconds_at(9) == pytest.approx(2.8)  # type: ignore[union-attr]


@pytest.mark.parametrize(("max_model_len", "num_blocks"), [(2, 8), (10, 8), (64, 2), (512, 3)])
def test_profile_of_a_short_context_has_fewer_points(max_model_len: int, num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, cache = ClockedRuntime(), make_cache(num_blocks)
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=runtime.perf_counter))
    table = cost.measure_profile(runtime, cache, max_model_len=max_model_len)  # type: ignore[arg-type]
    assert table.seconds_at(1) == pytest.approx(1.1)
    assert max(int(batch.positions.max()) for batch in runtime.batches) < min(max_model_len, cache.max_slots)
    cache.check_consistency()
    assert cache.pool.num_free == num_blocks

"""The checksum of quantised weights: no flipped bit and no exchanged page, sector or word goes unnoticed, however the pages are summed."""

import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from harness.native_network import BUILT, open_kernels
from paceline.models.storage.page_sums import PAGE_BYTES, PAGE_FACTORS, PageSums, checksum, numpy_page_sums
from paceline.runtimes.native.library import fastest_page_sums, native_page_sums

SECTOR = 512


def summed_by(level: str) -> PageSums:
    """The kernel's sums, of the library for one kind of processor. Called by several threads at once."""
    library = open_kernels(level)

    def sums(pages: np.ndarray, out: np.ndarray) -> None:
        library.paceline_page_sums(pages.ctypes.data, len(pages), PAGE_FACTORS.ctypes.data, out.ctypes.data)

    return sums


SUMS: dict[str, PageSums] = {
    "numpy": numpy_page_sums,
    "for this processor": fastest_page_sums(),
    **{level: summed_by(level) for level in BUILT},
}


def some_data(seed: int, num_bytes: int) -> np.ndarray:
    """Codes and scales of weights: bytes with patterns, and stretches of the same value."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, num_bytes).astype(np.uint8)
    data[: num_bytes // 8] = 0x88
    return data


def flip(data: np.ndarray, rng: np.random.Generator) -> None:
    data[rng.integers(len(data))] ^= np.uint8(1 << rng.integers(8))


def exchange(size: int) -> Callable[[np.ndarray, np.random.Generator], None]:
    """Two places of `size` bytes, aligned to it."""

    def change(data: np.ndarray, rng: np.random.Generator) -> None:
        first, second = (size * int(place) for place in rng.choice(len(data) // size, 2, replace=False))
        kept = data[first : first + size].copy()
        data[first : first + size] = data[second : second + size]
        data[second : second + size] = kept

    return change


def exchange_in_a_page(size: int) -> Callable[[np.ndarray, np.random.Generator], None]:
    def change(data: np.ndarray, rng: np.random.Generator) -> None:
        page = PAGE_BYTES * int(rng.integers(len(data) // PAGE_BYTES))
        exchange(size)(data[page : page + PAGE_BYTES], rng)

    return change


def exchange_neighbours(data: np.ndarray, rng: np.random.Generator) -> None:
    place = int(rng.integers(len(data) - 1))
    data[place], data[place + 1] = data[place + 1], data[place]


def flip_high_bits(data: np.ndarray, rng: np.random.Generator) -> None:
    """The highest bit of two words: what sums modulo a power of two are weakest at."""
    for word in rng.choice(len(data) // 4, 2, replace=False):
        data[4 * word + 3] ^= np.uint8(128)


def lose(size: int) -> Callable[[np.ndarray, np.random.Generator], None]:
    """What was never written reads as zeros."""

    def change(data: np.ndarray, rng: np.random.Generator) -> None:
        place = size * int(rng.integers(len(data) // size))
        data[place : place + size] = 0

    return change


def move(data: np.ndarray, rng: np.random.Generator) -> None:
    begin = int(rng.integers(len(data) - 100))
    data[begin:] = np.roll(data[begin:], int(rng.integers(1, 9)))


def write_twice(data: np.ndarray, rng: np.random.Generator) -> None:
    first, second = (PAGE_BYTES * int(page) for page in rng.choice(len(data) // PAGE_BYTES, 2, replace=False))
    data[first : first + PAGE_BYTES] = data[second : second + PAGE_BYTES]


CHANGES: dict[str, Callable[[np.ndarray, np.random.Generator], None]] = {
    "a flipped bit": flip,
    "two high bits": flip_high_bits,
    "exchanged pages": exchange(PAGE_BYTES),
    "exchanged sectors": exchange(SECTOR),
    "exchanged sectors of a page": exchange_in_a_page(SECTOR),
    "exchanged vectors of a page": exchange_in_a_page(32),
    "exchanged words of a page": exchange_in_a_page(4),
    "exchanged neighbours": exchange_neighbours,
    "a lost page": lose(PAGE_BYTES),
    "a lost sector": lose(SECTOR),
    "moved bytes": move,
    "a page in another's place": write_twice,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_page_sum_changes_with_every_kind_of_change(
    change: Callable[[np.ndarray, np.random.Generator], None], seed: int, large_counts: bool
) -> None:
    rng = np.random.default_rng(seed)
    data = some_data(seed, 16 * PAGE_BYTES + 100)
    good = checksum(data, numpy_page_sums)
    num_changed = 0
    for _ in range(20_000 if large_counts else 300):
        bad = data.copy()
        change(bad, rng)
        if not np.array_equal(bad, data):
            num_changed += 1
            assert checksum(bad, numpy_page_sums) != good
    assert num_changed > 100


def test_page_sum_changes_with_every_single_bit() -> None:
    data = some_data(1, PAGE_BYTES)
    sums = np.empty(1, np.uint64)
    numpy_page_sums(data.reshape(1, -1), sums)
    seen = {int(sums[0])}
    for bit in range(8 * PAGE_BYTES):
        data[bit // 8] ^= np.uint8(1 << bit % 8)
        numpy_page_sums(data.reshape(1, -1), sums)
        seen.add(int(sums[0]))
        data[bit // 8] ^= np.uint8(1 << bit % 8)
    assert len(seen) == 1 + 8 * PAGE_BYTES


def test_page_sum_factors_are_odd_and_differ_in_their_low_bits() -> None:
    """What makes another word and two exchanged words certain to be noticed."""
    factors = PAGE_FACTORS
    assert np.all(factors % np.uint64(2) == 1)
    assert len(np.unique(factors)) == len(factors) == PAGE_BYTES // 4
    differences = factors[:, None] - factors[None, :]
    low = differences & np.uint64(2**31 - 1)
    assert np.all((low != 0) | np.eye(len(factors), dtype=bool))


@pytest.mark.parametrize("name", SUMS)
def test_all_page_sum_implementations_agree(name: str, seed: int) -> None:
    for num_bytes in (0, 1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 2500 * PAGE_BYTES + 77):
        data = some_data(seed, num_bytes) if num_bytes else np.empty(0, np.uint8)
        expected = checksum(data, numpy_page_sums)
        for num_threads in (1, 2, 5):
            assert checksum(data, SUMS[name], num_threads=num_threads) == expected
    full = np.full(4 * PAGE_BYTES, 255, np.uint8)
    assert checksum(full, SUMS[name]) == checksum(full, numpy_page_sums)
    shifted = some_data(seed, 8 * PAGE_BYTES + 64)[64:]  # not at the beginning of a page of memory
    assert checksum(shifted, SUMS[name]) == checksum(shifted.copy(), numpy_page_sums)


def test_page_sum_threads_share_one_array_of_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors of one thread that another one's replaced in a cache were freed while a kernel read them."""
    handed: list[int] = []
    library = SimpleNamespace(paceline_page_sums=lambda pages, num_pages, factors, sums: handed.append(factors))
    monkeypatch.setattr("paceline.runtimes.native.library.kernels", lambda: library)
    checksum(np.zeros(8192 * PAGE_BYTES, np.uint8), native_page_sums, num_threads=4)
    assert len(handed) == 8
    assert set(handed) == {PAGE_FACTORS.ctypes.data}


@pytest.mark.skipif(len(SUMS) == 1, reason="no native kernels for this machine")
def test_page_sums_of_a_gigabyte_take_less_than_half_a_second() -> None:
    """0.09 s measured; here a sixteenth of it, and room for whatever else the machine does."""
    data = np.zeros(1 << 26, np.uint8)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        checksum(data, fastest_page_sums(), num_threads=2)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.5 / 16

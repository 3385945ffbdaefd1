"""Memory of the native runtime: where arrays begin, and that those of one arena are apart."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from paceline.runtimes.native.aligned import Arena, address_of, aligned_empty, aligned_zeros

SHAPES = [(1,), (3, 5), (17, 64), (1000, 7)]


@pytest.mark.parametrize("shape", SHAPES)
def test_arrays_begin_at_cache_lines_whatever_their_size(shape: tuple[int, ...]) -> None:
    arena = Arena()
    for _ in range(5):
        for array in (aligned_zeros(shape), aligned_empty(shape), arena.allocate(shape), arena.allocate(shape, np.uint8)):
            assert array.shape == shape
            assert array.flags.c_contiguous
            assert array.ctypes.data % 64 == 0
    assert not aligned_zeros(shape).any()


def test_address_of_a_strided_or_read_only_array_is_refused() -> None:
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    for one in (array, array[2:], np.zeros(1, np.int32), np.empty(0, np.uint8)):
        assert address_of(one) == one.ctypes.data
    array.flags.writeable = False
    for one in (array, np.zeros((4, 4))[:, 1:]):
        with pytest.raises((TypeError, ValueError)):
            address_of(one)


def test_arrays_of_an_arena_share_pieces_and_nothing_else() -> None:
    """Taken by four threads at once, more than one piece full; each is written whole before any is read."""
    arena, sizes = Arena(), [1 + 7919 * number % 700_000 for number in range(450)]
    with ThreadPoolExecutor(4) as pool:
        arrays = list(pool.map(lambda size: arena.allocate((size,), np.uint8), sizes))
    for number, array in enumerate(arrays):
        array[...] = number % 251
    assert all((array == number % 251).all() for number, array in enumerate(arrays))
    pieces = {id(array.base) for array in arrays}
    assert 1 < len(pieces) < 4


def test_an_array_that_gets_large_pages_alone_leaves_the_piece_to_others() -> None:
    arena = Arena()
    first, large, second = arena.allocate((100,)), arena.allocate((1 << 20,)), arena.allocate((100,))
    assert large.ctypes.data % 64 == 0
    assert first.base is second.base
    assert first.base is not large.base

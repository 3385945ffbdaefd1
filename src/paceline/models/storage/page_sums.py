"""A checksum of large arrays, limited by memory bandwidth. It depends on every byte and its position.

The sum of a 4 KiB page is the sum of its 32-bit words, each multiplied by an odd 64-bit factor for its position, modulo 2**64. SHA-256 of
all sums in order, and of the bytes after the last whole page, is the checksum. It changes if

* one word changes: a difference below 2**32 times an odd number is not 0 modulo 2**64;
* two words are exchanged: no two factors differ by a multiple of 2**31 (a test checks all pairs);
* a page changes in another way, such as a range of zeros or moved bytes, except with probability of about 2**-64;
* pages are exchanged: their sums are hashed in order.

This detects disk errors and half-written files. It does not protect against an attacker, who could also write a matching checksum.

Source: multilinear hashing (Carter and Wegman 1979; Lemire and Kaser 2014, section 2). Deviation: factors are constants, because no
attacker is assumed.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 4096
PageSums = Callable[[NDArray[np.uint8], NDArray[np.uint64]], None]
"""A function that writes the sums of contiguous pages [n, PAGE_BYTES] to an array [n] of uint64."""

_WORDS_PER_PAGE = PAGE_BYTES // 4
_PAGES_PER_TASK = 1024  # number of pages that a thread sums in one task
_PAGES_PER_SUM = 64  # number of pages summed at a time, so that the products fit in the CPU cache


def _make_factors() -> NDArray[np.uint64]:
    """Return 1024 pseudo-random odd numbers: splitmix64 of 1, 2, 3 …, with the lowest bit set."""
    shift = [np.uint64(bits) for bits in (30, 27, 31)]
    state = np.arange(1, _WORDS_PER_PAGE + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> shift[0])) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> shift[1])) * np.uint64(0x94D049BB133111EB)
    factors: NDArray[np.uint64] = (state ^ (state >> shift[2])) | np.uint64(1)
    factors.flags.writeable = False
    return factors


PAGE_FACTORS = _make_factors()
"""The factor of each word in a page. It is a constant of the module because kernels keep its address."""


def checksum(data: NDArray[np.uint8], page_sums: PageSums, *, num_threads: int = 1) -> bytes:
    """Return the 32-byte checksum of a contiguous array of bytes. It does not depend on which implementation `page_sums` is."""
    num_pages = len(data) // PAGE_BYTES
    pages = data[: num_pages * PAGE_BYTES].reshape(num_pages, PAGE_BYTES)
    sums = np.empty(num_pages, np.uint64)

    def sum_pages(begin: int) -> None:
        page_sums(pages[begin : begin + _PAGES_PER_TASK], sums[begin : begin + _PAGES_PER_TASK])

    begins = range(0, num_pages, _PAGES_PER_TASK)
    if num_threads == 1 or len(begins) < 2:
        for begin in begins:
            sum_pages(begin)
    else:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(sum_pages, begins))
    digest = hashlib.sha256(sums.astype("<u8", copy=False).tobytes())
    digest.update(data[num_pages * PAGE_BYTES :].tobytes())
    return digest.digest()


def numpy_page_sums(pages: NDArray[np.uint8], sums: NDArray[np.uint64]) -> None:
    """Compute the sums of pages with numpy. The kernels are four times as fast."""
    words = pages.view("<u4")
    for begin in range(0, len(words), _PAGES_PER_SUM):
        products = words[begin : begin + _PAGES_PER_SUM] * PAGE_FACTORS
        products.sum(axis=1, dtype=np.uint64, out=sums[begin : begin + _PAGES_PER_SUM])

"""A checksum of large arrays at memory bandwidth. It depends on every byte and its position.

The sum of a 4 KiB page is the sum of its 32-bit words, each times an odd 64-bit factor of its position, modulo 2**64. The sums in order,
and the bytes after the last whole page, are hashed with SHA-256. So

* changing one word changes the sum: |difference| < 2**32, times an odd number, is not 0 modulo 2**64;
* so does exchanging two words: no two factors differ by a multiple of 2**31 (a test checks all pairs);
* so does all but about one in 2**64 of other changes within a page: exchanged sectors, a range of zeros, moved bytes;
* exchanging pages changes the order of sums.

It detects disk errors and half-written files. It is no protection against an attacker who can write the file, and so its checksum.

Source: multilinear hashing (Carter and Wegman 1979; Lemire and Kaser 2014, section 2). Deviation: factors are fixed, because there is no
adversary.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 4096
PageSums = Callable[[NDArray[np.uint8], NDArray[np.uint64]], None]
"""Computes the sums of contiguous pages [n, PAGE_BYTES] into [n] uint64."""

_WORDS_PER_PAGE = PAGE_BYTES // 4
_PAGES_PER_TASK = 1024  # pages that a thread checksums per task
_PAGES_PER_SUM = 64  # pages checksummed at a time, so that the products fit in the CPU cache


def _factors() -> NDArray[np.uint64]:
    """Return [1024] pseudo-random odd numbers: splitmix64 of 1, 2, 3 …"""
    shift = [np.uint64(bits) for bits in (30, 27, 31)]
    state = np.arange(1, _WORDS_PER_PAGE + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> shift[0])) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> shift[1])) * np.uint64(0x94D049BB133111EB)
    factors: NDArray[np.uint64] = (state ^ (state >> shift[2])) | np.uint64(1)
    factors.flags.writeable = False
    return factors


PAGE_FACTORS = _factors()
"""A constant of the module: kernels keep its address."""


def checksum(data: NDArray[np.uint8], page_sums: PageSums, *, num_threads: int = 1) -> bytes:
    """Return a checksum of 32 bytes for `data` [bytes], contiguous. It is the same for every implementation of `page_sums`."""
    num_pages = len(data) // PAGE_BYTES
    pages = data[: num_pages * PAGE_BYTES].reshape(num_pages, PAGE_BYTES)
    sums = np.empty(num_pages, np.uint64)

    def fill(begin: int) -> None:
        page_sums(pages[begin : begin + _PAGES_PER_TASK], sums[begin : begin + _PAGES_PER_TASK])

    begins = range(0, num_pages, _PAGES_PER_TASK)
    if num_threads == 1 or len(begins) < 2:
        for begin in begins:
            fill(begin)
    else:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(fill, begins))
    digest = hashlib.sha256(sums.astype("<u8", copy=False).tobytes())
    digest.update(data[num_pages * PAGE_BYTES :].tobytes())
    return digest.digest()


def numpy_page_sums(pages: NDArray[np.uint8], sums: NDArray[np.uint64]) -> None:
    """Compute sums with numpy, four times slower than the kernels."""
    words = pages.view("<u4")
    for begin in range(0, len(words), _PAGES_PER_SUM):
        products = words[begin : begin + _PAGES_PER_SUM] * PAGE_FACTORS
        products.sum(axis=1, dtype=np.uint64, out=sums[begin : begin + _PAGES_PER_SUM])

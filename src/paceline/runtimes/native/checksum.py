"""Sums of a file's pages with our kernels, where there are any."""

import numpy as np
from numpy.typing import NDArray

from paceline.models.storage.page_sums import PAGE_FACTORS, PageSums, plain_page_sums
from paceline.runtimes.native.library import kernels, kernels_path


def fastest_page_sums() -> PageSums:
    """What sums pages fastest on this machine; the sums are the same."""
    return plain_page_sums if kernels_path() is None else native_page_sums


def native_page_sums(pages: NDArray[np.uint8], sums: NDArray[np.uint64]) -> None:
    """See `models/storage/page_sums.py`."""
    kernels().paceline_page_sums(pages.ctypes.data, len(pages), PAGE_FACTORS.ctypes.data, sums.ctypes.data)

"""Functions that tests run in processes of their own."""

import os
import time
from collections.abc import Callable
from typing import Any

_kept: list[bytes] = []


def echo(value: Any) -> Any:
    return value


def adder(first: int) -> Callable[[int], int]:
    if first < 0:
        raise ValueError("a setup that fails")
    return lambda second: first + second


def allocate(num_bytes: int) -> int:
    return len(bytearray(num_bytes))


def keep(num_bytes: int) -> int:
    """Allocate, and never free."""
    _kept.append(bytes(num_bytes))
    return len(_kept)


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def spin(limit: int) -> None:
    while limit:
        pass


def hold_the_gil(exponent: int) -> int:
    return (10 ** (10**exponent)).bit_length()


def fail(message: str) -> None:
    raise ValueError(message)


def leave(code: int) -> None:
    os._exit(code)


def panic(message: str) -> None:
    raise BaseException(message)  # as a panic in Rust is raised

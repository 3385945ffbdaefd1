"""Ways to damage a file: its bytes, the numbers of a binary header, the values of a JSON text. Each depends on its generator alone."""

import json
import struct
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np

Rng = np.random.Generator
Damage = Callable[[bytes, Rng], bytes]

NUMBERS = (0, 1, 2, 3, 5, 31, 32, 33, 64, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
TEXTS = (
    "", "x", "0", "-1", "\x00", "\x1b[2J", "\ud800", "x" * 5000, "../../etc/passwd", "/dev/zero", "~root", "é你😀", "{{ 1/0 }}", "nan",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    *NUMBERS, -1, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e-320, 1e38, 1e39, 1e308, float("nan"), float("inf"), float("-inf"),
    True, False, None, *TEXTS, [], {}, [None], [[]], [0] * 50, ["a", 1, None], {"a": {"b": {"c": []}}}, [1.5, -2.5], {"": ""},
    [2**64, 2**64],
)  # fmt: skip
NAMES = (
    "hidden_size", "head_dim", "rope_scaling", "rope_type", "type", "factor", "layer_types", "sliding_window", "eos_token_id", "dtype",
    "vocab", "merges", "added_tokens", "content", "id", "shape", "data_offsets", "__metadata__", "quantization", "model_type",
    "architectures",
)  # fmt: skip


def pick(rng: Rng, items: Any) -> Any:
    return items[int(rng.integers(len(items)))]


def flip(data: bytes, rng: Rng) -> bytes:
    damaged = bytearray(data)
    for position in rng.integers(0, max(1, _front(data, rng)), rng.integers(1, 9)):
        if position < len(damaged):
            damaged[position] ^= 1 << int(rng.integers(8))
    return bytes(damaged)


def truncate(data: bytes, rng: Rng) -> bytes:
    return data[: int(rng.integers(0, _front(data, rng) + 1))]


def cut_out(data: bytes, rng: Rng) -> bytes:
    begin = int(rng.integers(0, _front(data, rng) + 1))
    return data[:begin] + data[begin + int(rng.integers(1, 40)) :]


def repeat(data: bytes, rng: Rng) -> bytes:
    begin = int(rng.integers(0, _front(data, rng) + 1))
    return data[:begin] + data[begin : begin + int(rng.integers(1, 200))] * int(rng.integers(2, 20)) + data[begin:]


def insert(data: bytes, rng: Rng) -> bytes:
    begin = int(rng.integers(0, _front(data, rng) + 1))
    return data[:begin] + rng.integers(0, 256, int(rng.integers(1, 16))).astype(np.uint8).tobytes() + data[begin:]


def write_number(data: bytes, rng: Rng) -> bytes:
    """Some length, count or offset becomes another number."""
    layout = "<Q" if rng.integers(2) else "<I"
    size = struct.calcsize(layout)
    if len(data) < size:
        return data
    number = int(pick(rng, (*NUMBERS, len(data), len(data) // 2))) & (2 ** (8 * size) - 1)
    damaged = bytearray(data)
    struct.pack_into(layout, damaged, int(rng.integers(0, max(1, min(_front(data, rng), len(data)) - size + 1))), number)
    return bytes(damaged)


BYTES: tuple[Damage, ...] = (flip, truncate, cut_out, repeat, insert, write_number)


def damaged_json(value: Any, rng: Rng) -> Any:
    """A copy of a JSON value with one to three of its parts changed, dropped, added, exchanged or buried."""
    value = json.loads(json.dumps(value))
    for _ in range(int(rng.integers(1, 4))):
        holder, key = _place(value, rng)
        if holder is None:
            value = deepcopy(pick(rng, VALUES))
            continue
        how = int(rng.integers(8))
        if how < 4:
            holder[key] = deepcopy(pick(rng, VALUES))
        elif how == 4:
            del holder[key]
        elif how == 5 and isinstance(holder, dict):
            holder[pick(rng, (*NAMES, *TEXTS[:8]))] = holder[key]
        elif how == 6:
            other, place = _place(value, rng)
            if other is not None:
                holder[key] = json.loads(json.dumps(other[place], default=str))
        else:
            for _ in range(int(pick(rng, (1, 3, 70, 300)))):
                holder[key] = [holder[key]] if rng.integers(2) else {"a": holder[key]}
    return value


def json_text(value: Any, rng: Rng) -> bytes:
    """A value as some writer or other would write it."""
    text = json.dumps(value, ensure_ascii=bool(rng.integers(2)), indent=int(rng.integers(3)) or None)
    return text.encode("utf-8", "surrogatepass")


def damaged_json_text(value: Any, rng: Rng) -> bytes:
    """Mostly a valid text of damaged values, sometimes a damaged text."""
    how = int(rng.integers(10))
    if how == 0:
        return pick(rng, BYTES)(json_text(value, rng), rng)
    if how == 1:
        text = json_text(value, rng).decode("utf-8", "surrogatepass")
        digits = [index for index, char in enumerate(text) if char.isdigit()]
        if digits:
            place = int(pick(rng, digits))
            text = text[:place] + "9" * int(pick(rng, (20, 400, 5000, 100_000))) + text[place:]
        return text.encode("utf-8", "surrogatepass")
    return json_text(damaged_json(value, rng), rng)


def _front(data: bytes, rng: Rng) -> int:
    """Headers come first: half of the damage is there."""
    return min(len(data), 2000) if rng.integers(2) else len(data)


def _place(value: Any, rng: Rng) -> tuple[Any, Any]:
    """A container somewhere in a value and one of its keys; (None, None) where there is none."""
    found: tuple[Any, Any] = (None, None)
    while isinstance(value, dict | list) and value:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        found = value, pick(rng, keys)
        value = value[found[1]]
        if not rng.integers(4):
            break
    return found

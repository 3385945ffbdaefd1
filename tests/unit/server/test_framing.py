"""Large answers: the same bytes as those of small ones, made in pieces."""

import random
from typing import Any

import pytest

from paceline.server import framing
from paceline.server.framing import as_json, large_json

TEXTS = ["", "a", 'é"\\', "\u2028\u0085", "\ud83d", "😀\n", "word " * 3]


def value(generator: random.Random, depth: int) -> Any:
    kind = generator.randrange(6 if depth else 4)
    if kind == 4:
        return [value(generator, depth - 1) for _ in range(generator.randrange(9))]
    if kind == 5:
        return {generator.choice(TEXTS) + str(index): value(generator, depth - 1) for index in range(generator.randrange(5))}
    return [generator.choice(TEXTS), generator.randrange(-5, 10**6), -0.25, generator.choice([None, True, False])][kind]


@pytest.mark.parametrize(("items", "depth"), [(1, 12), (2, 12), (4, 2), (64, 12)])
def test_large_json_written_in_pieces_equals_json_dumps(items: int, depth: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("_PIECE_ITEMS", items), ("_MAX_DEPTH", depth)):
        monkeypatch.setattr(framing, name, number)
    generator = random.Random(seed)
    for _ in range(300):
        fields = {"a": value(generator, 5), "b": [], "c": {}, "d": tuple(range(items + 1))}
        assert large_json(fields) == as_json(fields)


def test_large_json_is_written_in_short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    real = framing._as_bytes
    monkeypatch.setattr(framing, "_as_bytes", lambda text: lengths.append(len(text)) or real(text))
    best = [{"token": "a", "logprob": -1.5, "bytes": [97]}] * 20
    content = [{"token": "a", "logprob": -1.5, "bytes": [97], "top_logprobs": best}] * 2000
    large_json({"choices": [{"message": {"content": "word"}, "logprobs": {"content": content}}], "tokens": [5] * 100_000})
    assert sum(lengths) > 1_000_000
    assert max(lengths) < 200_000

from pathlib import Path

import numpy as np
import pytest

from harness.checkpoints import write_byte_fallback_tokenizer
from paceline.engine.stop_matcher import StopStringMatcher
from paceline.tokenizer.tokenizer import Tokenizer

SPLIT = "\N{REPLACEMENT CHARACTER}"


class PieceDetokenizer:
    """Token i is pieces[i]; a piece that ends in SPLIT becomes final only with the token after it, like half a character."""

    def __init__(self, pieces):
        self._pieces = pieces
        self._pending = ""

    def push(self, token_id: int) -> str:
        piece = self._pending + self._pieces[token_id]
        self._pending = piece if piece.endswith(SPLIT) else ""
        return "" if self._pending else piece.replace(SPLIT, "")

    def flush(self) -> str:
        piece, self._pending = self._pending, ""
        return piece.replace(SPLIT, "")


def _feed(pieces, stop, *, include_stop=False):
    """Every piece one token; returns the stop, how many were taken and what was shown after each."""
    stop_matcher = StopStringMatcher(PieceDetokenizer(pieces), stop, include_stop=include_stop)
    shown = []
    for token_id in range(len(pieces)):
        is_stopped = stop_matcher.push(token_id)
        shown.append(stop_matcher.text)
        if is_stopped:
            break
    return stop_matcher, shown


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "text_with_stop"),
    [
        pytest.param(["ab", "cd"], ("cd",), "ab", "abcd", id="a token of its own"),
        pytest.param(["ab", "c", "", "dx"], ("bcd",), "a", "abcd", id="across tokens"),
        pytest.param(["abcdef"], ("cd",), "ab", "abcd", id="inside a token"),
        pytest.param(["aaab"], ("aab",), "a", "aaab", id="a false start inside"),
        pytest.param(["a", "a", "a", "b"], ("aab",), "a", "aaab", id="a false start across tokens"),
        pytest.param(["xyz"], ("z", "yz"), "x", "xyz", id="the one that begins first"),
        pytest.param(["xyz"], ("yz", "y"), "x", "xy", id="the shorter one of the same beginning"),
        pytest.param(["x", "y" + SPLIT, "z"], ("yz",), "x", "xyz", id="completed by a held-back piece"),
    ],
)
def test_stop_matcher_cuts_the_text_at_the_stop_string(pieces, stop, text, text_with_stop):
    for include_stop, wanted in ((False, text), (True, text_with_stop)):
        stop_matcher, _ = _feed(pieces, stop, include_stop=include_stop)
        assert stop_matcher.is_stopped
        assert stop_matcher.text == stop_matcher.finish() == wanted


def test_possible_stop_string_is_held_back_until_decided():
    _, shown = _feed(["a", "s", "t", "x", "st"], ("stop",))
    assert shown == ["a", "a", "a", "astx", "astx"]


def test_text_held_back_for_a_stop_string_is_released_at_the_end():
    stop_matcher, shown = _feed(["a", "st", "o"], ("stop",))
    assert shown[-1] == "a"
    assert stop_matcher.finish() == stop_matcher.finish() == stop_matcher.text == "asto"
    assert not stop_matcher.is_stopped


def test_held_back_piece_may_complete_a_stop_string_at_the_end():
    stop_matcher, _ = _feed(["a", "b" + SPLIT], ())
    assert (stop_matcher.text, stop_matcher.finish()) == ("a", "ab")
    stop_matcher, _ = _feed(["a", "sto", "p!" + SPLIT], ("stop",))
    assert (stop_matcher.text, stop_matcher.finish()) == ("a", "a")


def test_text_without_stop_strings_is_shown_at_once():
    _, shown = _feed(["a", "", "bc"], ())
    assert shown == ["a", "a", "abc"]


def test_streamed_text_is_never_retracted_by_a_stop_string(seed):
    """Against the whole text: shown is always a prefix, the end is at the first stop, and nothing is held back without need."""
    generator = np.random.default_rng(seed)
    for _ in range(3_000):
        alphabet = ["", "a", "b", "ab", "ba", "aab", "a" + SPLIT, "c"]
        pieces = [alphabet[index] for index in generator.integers(0, len(alphabet), 12)]
        stop = tuple("".join(generator.choice(["a", "b"], generator.integers(2, 5))) for _ in range(generator.integers(0, 3)))
        stop_matcher, shown = _feed(pieces, stop)
        final = stop_matcher.finish()
        assert all(final.startswith(text) for text in shown)
        detokenizer = PieceDetokenizer(pieces)
        raw = ""
        for token_id, text in enumerate(shown):
            raw += detokenizer.push(token_id)
            if any(one in raw for one in stop):
                assert token_id == len(shown) - 1
                assert text == final == raw[: min((at + len(one), at) for one in stop if (at := raw.find(one)) >= 0)[1]]
            else:
                held = raw[len(text) :]
                assert raw.startswith(text)
                assert held == "" or any(one.startswith(held) for one in stop)


def test_stop_string_spelled_in_byte_tokens_ends_at_its_last_byte(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(write_byte_fallback_tokenizer(tmp_path))
    ids = tokenizer.encode("a😀😀", add_special_tokens=False)
    stop = StopStringMatcher(tokenizer.detokenizer(), ["😀"], include_stop=False)
    assert [stop.push(token_id) for token_id in ids[:-4]] == [False] * (len(ids) - 5) + [True]
    assert stop.text == "a"

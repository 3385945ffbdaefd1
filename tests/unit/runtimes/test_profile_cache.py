"""Cached facts survive a process that dies while writing, and any garbage in their file."""

import os
from pathlib import Path

import pytest

from paceline.runtimes.profile_cache import FILE_NAME, ProfileCache, profile_key

GARBAGE = ["", "{", "[]", "null", "7", '"text"', "\x00\x01", "[" * 100_000, '{"a": 1} trailing']


def test_profile_cache_entry_is_read_by_the_next_process(tmp_path: Path) -> None:
    facts = ProfileCache(tmp_path / "new" / "folder")
    assert facts.get("a") is None
    facts.put("a", "one")
    facts.put("b", {"two": 2})
    facts.put("a", "three")
    again = ProfileCache(tmp_path / "new" / "folder")
    assert (again.get("a"), again.get("b"), again.get("c")) == ("three", {"two": 2}, None)


@pytest.mark.parametrize("content", [*[text.encode() for text in GARBAGE], b"\xff\xfe"], ids=range(len(GARBAGE) + 1))
def test_invalid_profile_cache_file_is_ignored_and_overwritten(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    facts = ProfileCache(tmp_path)
    assert facts.get("a") is None
    facts.put("a", 1)
    assert facts.get("a") == 1


def test_interrupted_profile_cache_writer_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = ProfileCache(tmp_path)
    facts.put("a", 1)

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        facts.put("a", 2)
    monkeypatch.undo()
    assert facts.get("a") == 1
    facts.put("a", 3)
    assert facts.get("a") == 3


def test_unwritable_profile_cache_directory_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    facts = ProfileCache(tmp_path / "file")
    facts.put("a", 1)
    assert facts.get("a") is None
    (tmp_path / FILE_NAME).mkdir()
    facts = ProfileCache(tmp_path)
    facts.put("a", 1)
    assert facts.get("a") is None


def test_profile_cache_without_a_directory_stores_nothing() -> None:
    facts = ProfileCache(None)
    facts.put("a", 1)
    assert facts.get("a") is None


def test_profile_cache_key_depends_on_all_its_parts() -> None:
    key = profile_key("numerics", "graph", 2, (1, 2))
    assert key == profile_key("numerics", "graph", 2, (1, 2))
    others = [
        profile_key("cost", "graph", 2, (1, 2)),
        profile_key("numerics", "graph", 3, (1, 2)),
        profile_key("numerics", "graph", 2, (1, 3)),
    ]
    assert len({key, *others, profile_key("numerics", "graph2", 2, (1, 2)), profile_key("numerics", "graph", 2)}) == 6
    assert key.startswith("numerics:")

"""Prompts of files: which records are read, how texts are cut, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.checkpoints import write_checkpoint
from harness.quick_profiles import quick_profiles
from paceline.engine.loader import LoadedEngine
from paceline.errors import ConfigError
from paceline.training import prompts
from paceline.training.prompts import read_prompts, write_own_prompts
from paceline.training.recorder import open_recorder
from paceline.training.settings import TrainSettings

SETTINGS = TrainSettings(drafter="eagle3", max_prompt_tokens=40, max_answer_tokens=24, threads=1)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedEngine:
    target = write_checkpoint(tmp_path_factory.mktemp("prompts"), "llama")
    with quick_profiles():
        return open_recorder(replace(SETTINGS, model=str(target)), (1, 2), 64)[0]


def write_lines(path: Path, records: list[object]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"prompt": "the cat"}, "the cat"),
        ({"question": "the cat", "answer": "a mat"}, "the cat"),
        ({"instruction": "the cat", "input": "red"}, "the cat\n\nred"),
        ({"turns": ["USER: the cat", "SYSTEM: yes"]}, "the cat"),
        ({"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "a mat"}]}, "the cat"),
    ],
)
def test_training_record_in_any_known_form_becomes_a_prompt(
    record: dict[str, object], text: str, loaded: LoadedEngine, tmp_path: Path
) -> None:
    (prompt,) = read_prompts([write_lines(tmp_path / "some.jsonl", [record])], loaded, SETTINGS, most=5)
    assert prompt.token_ids == loaded.input_processor.chat_token_ids([{"role": "user", "content": text}])
    assert (prompt.source, prompt.answer_mask) == ("some", None)


def test_training_answer_kept_from_the_data_is_marked(loaded: LoadedEngine, tmp_path: Path) -> None:
    name = write_lines(tmp_path / "some.jsonl", [{"prompt": "the cat", "response": "sat on"}, {"prompt": "no answer"}])
    (prompt,) = read_prompts([name], loaded, replace(SETTINGS, answers="keep", data=(name,)), most=5)
    start = loaded.input_processor.chat_token_ids([{"role": "user", "content": "the cat"}])
    end = [*loaded.input_processor.tokenizer.encode_as_text("sat on"), loaded.input_processor.eos_token_ids[0]]
    assert prompt.token_ids == start + end
    assert prompt.answer_mask == [False] * len(start) + [True] * len(end)


def test_training_texts_are_cut_into_prompts(loaded: LoadedEngine, tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("the cat sat on the mat " * 60, encoding="utf-8")
    continued = read_prompts([str(path)], loaded, SETTINGS, most=50)
    assert len(continued) > 3
    assert max(len(one.token_ids) for one in continued) <= SETTINGS.max_prompt_tokens
    kept = read_prompts([str(path)], loaded, replace(SETTINGS, answers="keep", data=(str(path),)), most=50)
    assert all(one.answer_mask is not None and one.answer_mask[1:] == [True] * (len(one.token_ids) - 1) for one in kept)


def test_training_files_alternate_and_long_prompts_are_left_out(loaded: LoadedEngine, tmp_path: Path) -> None:
    first = write_lines(tmp_path / "first.jsonl", [{"prompt": "the " * 200}] + [{"prompt": "cat"}] * 3)
    second = write_lines(tmp_path / "second.jsonl", [{"prompt": "dog"}] * 2)
    found = read_prompts([first, second], loaded, SETTINGS, most=4)
    assert [one.source for one in found] == ["first", "second", "first", "second"]
    assert found == read_prompts([first, second], loaded, SETTINGS, most=4)


@pytest.mark.parametrize(("name", "text"), [("bad.jsonl", "{"), ("none.jsonl", '{"title": "x"}'), ("absent.jsonl", None)])
def test_unusable_training_file_is_refused(name: str, text: str | None, loaded: LoadedEngine, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=name):
        read_prompts([str(tmp_path / name)], loaded, SETTINGS, most=5)


def test_target_writes_its_own_training_prompts(loaded: LoadedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_ROUND", 32)
    monkeypatch.setattr(prompts, "_MAX_TURN_TOKENS", 12)
    end = loaded.input_processor.eos_token_ids[0]
    inputs = replace(loaded.input_processor, eos_token_ids=(end, *range(2, 40)))  # a random target seldom ends a turn
    loaded = replace(loaded, input_processor=inputs)
    first = write_own_prompts(loaded, SETTINGS, 5)
    assert len(first) == 5
    for one in first:
        assert one.source == "self"
        assert len(one.token_ids) <= SETTINGS.max_prompt_tokens
    assert first == write_own_prompts(loaded, SETTINGS, 5)  # a function of the seed
    assert first != write_own_prompts(loaded, replace(SETTINGS, seed=1), 5)

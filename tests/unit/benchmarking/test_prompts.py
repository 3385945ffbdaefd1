"""Prompts come from the package, from users' files, from Spec-Bench's, and from the target itself."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.benchmarking.plan import BenchPlan
from paceline.benchmarking.requests import (
    RANDOM_TOKENS,
    EncodedPrompt,
    encode,
    encode_workloads,
    make_copy_prompts,
    make_worker_requests,
    random_prompts,
    replace_tokens,
    select_workloads,
)
from paceline.benchmarking.workloads import NAMES, Workload, builtin_workload, read_spec_bench
from paceline.errors import ConfigError
from paceline.models.checkpoint import read_model_config
from paceline.prompt_file import PromptLine, read_prompts
from paceline.tokenizer.tokenizer import Tokenizer

QUESTION = {"question_id": 81, "category": "writing", "turns": ["Write a letter.", "Shorter."]}


@pytest.fixture(scope="module")
def tokenizer(mini_dir: Path) -> Tokenizer:
    return Tokenizer.open(mini_dir)


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), encoding="utf-8")
    return path


# --- files ---


@pytest.mark.parametrize("workload", [builtin_workload(name) for name in NAMES if name != "random"], ids=lambda one: one.name)
def test_builtin_workload_has_eight_different_prompts(workload: Any) -> None:
    assert len({str(prompt) for prompt in workload.prompts}) == 8


def test_unknown_workload_error_lists_the_known_workloads() -> None:
    with pytest.raises(ConfigError, match=r"workload is 'poems': use one of chat, code, .*--prompts"):
        builtin_workload("poems")


def test_each_line_of_a_text_file_is_a_bench_prompt(tmp_path: Path) -> None:
    found = read_prompts(written(tmp_path / "mine.txt", "One", "", '{"prompt": "not JSON here"}'))
    assert [prompt.text for prompt in found] == ["One", '{"prompt": "not JSON here"}']


def test_jsonl_prompts_are_texts_messages_or_token_ids(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    path = written(
        tmp_path / "mine.jsonl",
        {"prompt": "One", "prediction": "Two"},
        {"messages": messages, "prediction": [4, 5]},
        {"prompt_token_ids": [1, 2, 3]},
    )
    assert read_prompts(path) == [
        PromptLine(text="One", prediction="Two"),
        PromptLine(messages=tuple(messages), prediction=(4, 5)),
        PromptLine(token_ids=(1, 2, 3)),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 of .* is no JSON"),
        ([1], r"line 2 of .* is \[1\]: give an object"),
        ({"text": "x"}, "line 2 of .* has no prompt: give one of prompt, messages, prompt_token_ids"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "has prompt and prompt_token_ids"),
        ({"prompt": 3}, "line 2 of .*: prompt is 3: give a text"),
        ({"prompt_token_ids": [1, -2]}, "prompt_token_ids is .*: give a list of token ids"),
        ({"messages": []}, "messages is .*: give a list of objects"),
        ({"prompt": "x", "prediction": 7}, "prediction is 7: give a text or a list"),
    ],
)
def test_invalid_line_of_a_prompt_file_is_named(tmp_path: Path, line: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_prompts(written(tmp_path / "mine.jsonl", {"prompt": "fine"}, line))


def test_missing_or_empty_prompt_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*none.jsonl"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"cannot be read: .* is a directory"):
        read_prompts(tmp_path)
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompts(written(tmp_path / "empty.txt", ""))


def test_spec_bench_file_gives_one_workload_per_category(tmp_path: Path) -> None:
    other = {**QUESTION, "category": "math", "turns": ["1 + 1?"]}
    found = read_spec_bench(written(tmp_path / "question.jsonl", QUESTION, other, QUESTION))
    assert [(name, len(prompts)) for name, prompts in found.items()] == [("writing", 2), ("math", 1)]
    assert found["writing"][0].messages == ({"role": "user", "content": "Write a letter."},)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nonsense", "line 2 of .* is no JSON"),
        ({"category": "a", "turns": ["b"]}, "line 2 of .* has no question_id"),
        ({**QUESTION, "category": None}, "line 2 of .*: category is None"),
        ({**QUESTION, "turns": []}, r"line 2 of .*: turns is \[\]"),
        ({**QUESTION, "turns": [1]}, r"line 2 of .*: turns is \[1\]: give a list of texts"),
    ],
)
def test_invalid_line_of_a_spec_bench_file_is_named(tmp_path: Path, line: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_spec_bench(written(tmp_path / "question.jsonl", QUESTION, line))


def test_published_spec_bench_file_has_480_questions(shared_dir: Path) -> None:
    path = shared_dir / "data" / "prompts" / "spec_bench_question.jsonl"
    if not path.is_file():
        pytest.skip("no prompts in ../shared")
    found = {name: len(prompts) for name, prompts in read_spec_bench(path).items()}
    assert sum(found.values()) == 480
    assert found["translation"] == 80


def test_two_workloads_with_the_same_name_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "chat.txt", "Hello")
    with pytest.raises(ConfigError, match="two workloads are called 'chat'"):
        select_workloads(BenchPlan(workloads=("chat",), prompts=path))
    assert [one.name for one in select_workloads(BenchPlan(prompts=path))] == ["chat"]
    assert [one.name for one in select_workloads(BenchPlan())] == list(NAMES)


# --- made ---


def test_bench_messages_are_encoded_with_the_chat_template(tokenizer: Tokenizer) -> None:
    messages = ({"role": "user", "content": "Hi"},)
    assert list(encode(PromptLine(messages=messages), tokenizer, 4096).prompt_ids) == tokenizer.apply_chat_template(messages)


def test_bench_messages_without_a_chat_template_are_joined_as_text(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "has_chat_template", False)
    assert list(encode(PromptLine(messages=({"role": "user", "content": "Hi"},)), tokenizer, 4096).prompt_ids) == tokenizer.encode("Hi\n")


def test_bench_token_id_out_of_range_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="token id 4096: ids of this model are below 4096"):
        encode(PromptLine(token_ids=(1, 4096)), tokenizer, 4096)
    with pytest.raises(ConfigError, match="token id 9999"):
        encode(PromptLine(text="x", prediction=(9999,)), tokenizer, 4096)


def test_random_bench_prompts_are_uniform_and_reproducible_by_seed() -> None:
    found = random_prompts(50, 16, seed=3)
    ids = [token_id for prompt in found for token_id in prompt.prompt_ids]
    assert len(ids) == 50 * RANDOM_TOKENS
    assert set(ids) == set(range(16))
    assert max(ids.count(token_id) for token_id in set(ids)) < 300  # 200 are expected
    assert found == random_prompts(50, 16, seed=3)
    assert found != random_prompts(50, 16, seed=4)


@pytest.mark.parametrize(("length", "changed"), [(100, 5), (96, 5), (20, 1), (3, 1)])
def test_bench_prediction_replaces_five_percent_of_the_tokens(length: int, changed: int) -> None:
    text = list(range(length))
    found = replace_tokens(text, 4096, seed=1)
    assert sum(one != other for one, other in zip(text, found, strict=True)) == changed
    assert found == replace_tokens(text, 4096, seed=1)
    assert all(0 <= token_id < 4096 for token_id in found)


@pytest.mark.parametrize("in_prompt", [False, True])
def test_copying_workload_puts_the_prediction_into_the_prompt_if_set(tokenizer: Tokenizer, in_prompt: bool) -> None:
    prompts = [EncodedPrompt((5, 6, 7)), EncodedPrompt((8, 9))]
    answers = {
        prompts[0]: tokenizer.encode("A letter is put into a box."),
        prompts[1]: tokenizer.encode("Then it travels by train to town."),
    }
    found = make_copy_prompts(prompts, answers.__getitem__, tokenizer, in_prompt=in_prompt, vocab_size=4096, seed=2)
    for one, prompt in zip(found, prompts, strict=True):
        differing = [a != b for a, b in zip(one.prediction_ids, answers[prompt], strict=True)]
        assert sum(differing) == 1
        shown = tokenizer.decode(one.prompt_ids)
        assert ("Write the text again without the mistakes" in shown) == in_prompt
        assert (tokenizer.decode(one.prediction_ids) in shown) == in_prompt
        assert (one.prompt_ids == prompt.prompt_ids) != in_prompt


def test_bench_prompts_longer_than_the_context_are_left_out_with_a_notice(tmp_path: Path, tokenizer: Tokenizer, mini_dir: Path) -> None:
    config = read_model_config(mini_dir)
    path = written(tmp_path / "mine.jsonl", {"prompt_token_ids": [1] * 2000}, {"prompt_token_ids": [1] * 9})
    found = encode_workloads(BenchPlan(), select_workloads(BenchPlan(prompts=path)), config, tokenizer, (4, 96))
    assert [len(one.prompt_ids) for one in found.prompts["mine"]] == [9]
    assert found.notices == ("1 of 2 prompts of 'mine' are longer than the context: left out",)
    with pytest.raises(ConfigError, match="no prompt of 'mine' leaves room for 96 tokens in a context of 2048: lower --max-tokens"):
        encode_workloads(BenchPlan(), [Workload("mine", tuple(read_prompts(path)))], config, tokenizer, (1, 96))


def test_last_bench_batch_is_filled_with_the_first_prompts() -> None:
    prompts = [EncodedPrompt((number,)) for number in range(3)]
    found = make_worker_requests("chat", 0.5, prompts, batch_size=2)
    assert [[prompt.prompt_ids[0] for prompt in order.prompts] for order in found] == [[0, 1], [2, 0]]
    assert [one["seed"] for one in found[1].as_dict(9, seed=7)["batch"]] == [9, 10]
    assert make_worker_requests("chat", 0.5, prompts, batch_size=1)[2].as_dict(9, seed=7) == {
        "prompt_ids": [2], "max_tokens": 9, "temperature": 0.5, "seed": 9,
    }  # fmt: skip


def test_a_byte_order_mark_belongs_to_no_prompt(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(b"\xef\xbb\xbfOne\r\nTwo\r\n")
    assert [line.text for line in read_prompts(path)] == ["One", "Two"]


def test_bench_accepts_messages_with_parts_and_identifies_invalid_prompts(mini_dir: Path, tmp_path: Path) -> None:
    tokenizer, config = Tokenizer.open(mini_dir), read_model_config(mini_dir)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    found = encode(PromptLine(messages=tuple(parts)), tokenizer, 4096)
    assert list(found.prompt_ids) == tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    path = written(tmp_path / "mine.jsonl", {"prompt": "fine"}, {"messages": [{"role": "user", "content": 5}]})
    with pytest.raises(ConfigError, match=r"prompt 2 of 'mine': .*content"):
        encode_workloads(BenchPlan(), [Workload("mine", tuple(read_prompts(path)))], config, tokenizer, (2, 9))


def test_bench_tells_how_many_prompts_of_a_file_it_uses(mini_dir: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "mine.txt", "One", "Two", "Three")
    plan = BenchPlan(prompts=path)
    found = encode_workloads(
        plan, [Workload("mine", tuple(read_prompts(path)))], read_model_config(mini_dir), Tokenizer.open(mini_dir), (2, 9)
    )
    assert found.notices == ("the first 2 of 3 prompts of 'mine' are used: see --num-prompts",)

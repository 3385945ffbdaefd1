"""A text the output will resemble, given with a request or on the command line."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from harness.checkpoints import write_checkpoint
from paceline import LLM, RequestError, SamplingParams
from paceline.cli import app
from paceline.cli.run import MAX_PREDICTION_BYTES
from paceline.drafters.suffix import SuffixDrafter, SuffixStore
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import Drafter

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8, 9], [30, 31, 32]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=2)


def open_llm(directory: Path, drafter: str | list[str] | Drafter = "prediction") -> LLM:
    llm = LLM(str(directory), threads=2, device="cpu", kv_cache_gb=0.02, drafter=drafter)
    llm.engine.speculator.policy = FixedDraftLength(4)
    return llm


@pytest.fixture(scope="module")
def answers(directory: Path) -> list[list[int]]:
    return [output.token_ids for output in open_llm(directory, "none").generate(PROMPTS, GREEDY)]


def test_each_prompt_may_have_its_own_prediction(directory: Path, answers: list[list[int]]) -> None:
    llm = open_llm(directory)
    outputs = llm.generate(PROMPTS, GREEDY, prediction=[answers[0], None, np.array(answers[2])])
    assert [output.token_ids for output in outputs] == answers
    assert [output.speculation.num_accepted_tokens > 15 for output in outputs] == [True, False, True]
    assert outputs[1].speculation.num_draft_tokens == 0


def test_one_prediction_as_text_or_ids_applies_to_all_prompts(directory: Path, answers: list[list[int]]) -> None:
    llm = open_llm(directory)
    for prediction in (answers[0], tuple(answers[0]), np.array(answers[0])):
        outputs = llm.generate(PROMPTS, GREEDY, prediction=prediction)
        assert [output.token_ids for output in outputs] == answers
        assert outputs[0].speculation.acceptance_rate == 1.0
    text = open_llm(directory, "none").generate("w5 w6", GREEDY)[0].text
    (output,) = llm.generate("w5 w6", GREEDY, prediction=text)
    assert output.text == text
    assert output.speculation.num_draft_tokens > 0


def test_stream_and_combined_drafters_use_predictions(directory: Path, answers: list[list[int]]) -> None:
    llm = open_llm(directory, ["ngram", "prediction"])
    *_, last = llm.stream(PROMPTS[0], GREEDY, prediction=answers[0])
    assert last.output is not None
    assert last.output.token_ids == answers[0]
    assert last.output.speculation.num_accepted_tokens > 15


@pytest.mark.parametrize("drafter", ["none", "ngram", "suffix"])
def test_prediction_without_its_drafter_is_refused(directory: Path, drafter: str) -> None:
    with pytest.raises(RequestError, match='drafter="prediction"') as caught:
        open_llm(directory, drafter).generate([5], GREEDY, prediction="w5")
    assert caught.value.parameter == "prediction"


@pytest.mark.parametrize(
    ("prediction", "said"),
    [
        ([[1], [2]], "3 prompts"),
        (["a"], "3 prompts"),
        (5, "3 prompts"),
        ([5, "a", 6], "no token id|prediction is 5"),
        ([5, 10_000], "10000"),
        ([-1], "-1"),
        ([1.5], "1.5"),
        ([[1], [2.5], None], "2.5"),
    ],
    ids=str,
)
def test_invalid_prediction_is_refused_before_a_pass(directory: Path, prediction: Any, said: str) -> None:
    llm = open_llm(directory)
    with pytest.raises(RequestError, match=said) as caught:
        llm.generate(PROMPTS, GREEDY, prediction=prediction)
    assert caught.value.parameter == "prediction"
    assert llm.engine.cache.pool.num_free == llm.engine.cache.pool.num_blocks


def test_suffix_drafter_uses_finished_outputs_of_its_namespace_only(directory: Path) -> None:
    prompt = np.random.default_rng(3).integers(3, 90, 12).tolist()
    sampled = replace(GREEDY, temperature=1.5, seed=4, max_tokens=32)
    llm = open_llm(directory, SuffixDrafter(store=SuffixStore()))
    first = llm.generate(prompt, sampled, namespace="a")[0]
    again = {name: llm.generate(prompt, sampled, namespace=name)[0] for name in ("a", "b", None)}
    assert all(output.token_ids == first.token_ids for output in again.values())
    assert again["a"].speculation.num_accepted_tokens > 15
    assert (
        again["b"].speculation.num_accepted_tokens == again[None].speculation.num_accepted_tokens == first.speculation.num_accepted_tokens
    )
    with pytest.raises(RequestError, match="namespace"):
        llm.generate(prompt, sampled, namespace=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("ending", ["off", "no drafts", "aborted", "failed"])
def test_suffix_store_keeps_no_failed_aborted_or_excluded_output(directory: Path, ending: str) -> None:
    """An output is offered to others of its namespace only where its sender let drafters see it, and it came to its end."""

    def fail_late(token_ids: Sequence[int], scores: Any) -> Any:
        if len(token_ids) > 20:
            raise ValueError
        return scores

    store = SuffixStore()
    llm = open_llm(directory, SuffixDrafter(store=store))
    if ending == "aborted":
        stream = llm.stream(PROMPTS[0], GREEDY, namespace="a")
        for _ in range(9):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
    elif ending == "failed":
        with pytest.raises(RequestError):
            llm.generate(PROMPTS[0], replace(GREEDY, processors=[fail_late]), namespace="a")
    else:
        speculation = {"enabled": False} if ending == "off" else {"num_speculative_tokens": 0}
        llm.generate(PROMPTS[0], GREEDY, namespace="a", speculation=speculation)
    assert store.num_stored_tokens("a") == 0
    llm.generate(PROMPTS[0], GREEDY, namespace="a")
    assert store.num_stored_tokens("a") == GREEDY.max_tokens + 1, "and one separator"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(
        app, ["run", "w5 w6 w7", "--offline", "--max-tokens", "24", "--ignore-eos", "--kv-cache-gb", "0.02", *arguments]
    )


def test_prediction_file_option_puts_the_prediction_drafter_first(directory: Path, tmp_path: Path) -> None:
    plain = json.loads(run("--model", str(directory), "--drafter", "none", "--json").stdout)
    path = tmp_path / "expected.txt"
    path.write_text(plain["text"], encoding="utf-8")
    for given, name in [(("--drafter", "ngram"), "prediction+ngram"), (("--drafter", "prediction"), "prediction")]:
        done = run("--model", str(directory), "--prediction-file", str(path), "--json", *given)
        assert done.exit_code == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["token_ids"] == plain["token_ids"]
        assert answer["drafter"] == name


@pytest.mark.skipif(os.name == "nt", reason="there are no such files there")
@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
def test_prediction_file_that_is_a_pipe_device_or_too_large_is_refused(directory: Path, tmp_path: Path, kind: str) -> None:
    path = Path("/dev/full") if kind == "device" else tmp_path / "expected"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(MAX_PREDICTION_BYTES + 1)
    done = run("--model", str(directory), "--prediction-file", str(path))
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert ("more than the 64000000 bytes" if kind == "large" else "is no regular file") in done.stderr


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["absent", "no text"])
def test_unreadable_prediction_file_is_one_error_line(directory: Path, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "expected.txt"
    if content is not None:
        path.write_bytes(content)
    done = run("--model", str(directory), "--prediction-file", str(path))
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "expected.txt" in done.stderr

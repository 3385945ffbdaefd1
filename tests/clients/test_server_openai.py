"""`paceline serve` with the official OpenAI client, libraries built on it, lm-eval and schemathesis, all unchanged."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.server_process import Server
from paceline import LLM, SamplingParams

KEY = "key-of-the-client-tests"
HERE = Path(__file__).parent
QUESTION = "I need a taxi to the airport."
MESSAGES = [{"role": "user", "content": QUESTION}]
PROMPT = "The old fisherman"
GREEDY, SHORT = SamplingParams(max_tokens=24), SamplingParams(max_tokens=12)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with closing(Server("--quiet", PACELINE_API_KEYS=KEY)) as server:
        yield server


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("mini", drafter="none", threads=1) as llm:
        yield llm


def called(clients: Path, *command: object, cwd: Path | None = None, **more: str) -> str:
    """What a program of the clients' environment prints."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": KEY, **more}
    command = (clients.absolute() / "servers/bin/python", *command)
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, env=environment, timeout=600, cwd=cwd)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def asked(clients: Path, script: str, url: str, *more: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(called(clients, HERE / script, f"{url}/v1", KEY, *more).splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def by_openai(clients: Path, server: Server) -> dict[str, Any]:
    return asked(clients, "openai_calls.py", server.url)


@pytest.fixture(scope="module")
def by_frameworks(clients: Path, server: Server) -> dict[str, Any]:
    return asked(clients, "framework_calls.py", server.url)


def test_openai_client_gets_the_engine_text_whole_and_streamed(by_openai: dict[str, Any], llm: LLM) -> None:
    found = by_openai["chats"]
    sampled = SamplingParams(max_tokens=24, temperature=0.9, seed=7)
    for name, params in (("greedy", GREEDY), ("sampled", sampled)):
        answer = llm.chat(MESSAGES, params)
        assert found[name] == found[f"{name} streamed"] == answer.text
        assert found[f"{name} usage"]["completion_tokens"] == len(answer.token_ids)
        assert found[f"{name} streamed usage"]["total_tokens"] == found[f"{name} usage"]["total_tokens"]
    assert found["helper"] == found["greedy"]
    assert "content.done" in found["helper events"]
    assert found["drafter"] == "none"
    assert found["id"].startswith("req-")
    assert found["samples"] > 1
    together = [llm.chat(MESSAGES, SamplingParams(max_tokens=24, temperature=0.9, seed=seed)).text for seed in range(4)]
    assert by_openai["together"] == together
    texts = by_openai["completions"]
    assert texts["text"] == texts["streamed"] == llm.generate(PROMPT, SHORT)[0].text
    assert texts["echoed"] == "".join(texts["tokens"]) == PROMPT + texts["text"]
    assert by_openai["models"] == [["mini"], "mini"]


def test_openai_client_reads_logprobs_and_parsed_json_schemas(by_openai: dict[str, Any], llm: LLM) -> None:
    expected = llm.chat(MESSAGES, SamplingParams(max_tokens=24, logprobs=2)).logprobs
    assert expected is not None
    found = by_openai["chats"]["logprobs"]
    assert [one["logprob"] for one in found] == pytest.approx([one.logprob for one in expected], rel=1e-6)
    assert [len(one["top_logprobs"]) for one in found] == [2] * len(expected)
    assert set(by_openai["chats"]["parsed"]) == {"age", "is_tall"}


def test_openai_client_raises_its_own_class_for_every_error(by_openai: dict[str, Any]) -> None:
    assert by_openai["errors"] == {
        "key": {"class": "AuthenticationError", "status": 401, "param": None, "code": "invalid_api_key"},
        "model": {"class": "NotFoundError", "status": 404, "param": "model", "code": "model_not_found"},
        "field": {"class": "BadRequestError", "status": 400, "param": "temperature", "code": "invalid_value"},
        "unknown": {"class": "BadRequestError", "status": 400, "param": "temperatur", "code": "unknown_parameter"},
        "long": {"class": "BadRequestError", "status": 400, "param": "messages", "code": "context_length_exceeded"},
        "streamed": {"class": "BadRequestError", "status": 400, "param": "top_p", "code": "invalid_value"},
        "path": {"class": "InternalServerError", "status": 501, "param": None, "code": "not_served"},
    }


def test_openai_client_retries_on_a_full_server(clients: Path, llm: LLM) -> None:
    with closing(Server("--quiet", "--max-num-seqs", "1", "--max-queue", "0", PACELINE_API_KEYS=KEY)) as server:
        found = asked(clients, "openai_calls.py", server.url, "busy")
    assert (found["class"], found["status"], found["code"]) == ("RateLimitError", 429, "queue_full")
    assert found["retried"] == llm.chat(MESSAGES, GREEDY).text


def test_litellm_and_langchain_get_the_engine_text(by_frameworks: dict[str, Any], llm: LLM) -> None:
    answer, text = llm.chat(MESSAGES, GREEDY), llm.generate(PROMPT, SHORT)[0].text
    for name in ("litellm", "langchain"):
        found = by_frameworks[name]
        assert found["whole"] == found["streamed"] == answer.text, name
        assert (found["usage"], found["text"]) == (len(answer.token_ids), text), name
    assert by_frameworks["litellm"]["error"] == "NotFoundError"
    hello = llm.chat([{"role": "user", "content": "Hello"}], GREEDY).text
    assert by_frameworks["langchain"]["batch"] == [answer.text, hello, answer.text]
    assert isinstance(by_frameworks["langchain"]["parsed"], int)


CHOICES = [
    {"question": "The old fisherman went down to the", "choices": [" sea", " zebra", " of the the"], "answer": 0},
    {"question": "def add(a, b):\n    return", "choices": [" a + b", " purple", " taxi"], "answer": 0},
    {"question": "I need a taxi to the", "choices": [" airport", " seven"], "answer": 0},
]
CHOICE_TASK = """
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
TEXT_TASK = """
task: local_text
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{expected}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def samples(
    clients: Path, server: Server, llm: LLM, mini_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """What lm-eval logs of each document, by task."""
    folder = tmp_path_factory.mktemp("lm_eval")
    params = SamplingParams(max_tokens=12, stop=["\n"])
    texts = [{"question": one["question"], "expected": llm.generate(one["question"], params)[0].text} for one in CHOICES]
    for name, task, documents in (("local_choice", CHOICE_TASK, CHOICES), ("local_text", TEXT_TASK, texts)):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in documents))
        (folder / f"{name}.yaml").write_text(task.replace("FILE", str(path)))
    options = f"model=mini,base_url={server.url}/v1/completions,tokenizer={mini_dir},tokenizer_backend=huggingface,tokenized_requests=False"
    command = ["-m", "lm_eval", "run", "--model", "local-completions", "--model_args", options + ",num_concurrent=1,max_length=512"]
    command += ["--tasks", "local_choice,local_text", "--include_path", str(folder), "--log_samples", "--output_path", str(folder / "out")]
    called(clients, *command, HF_HOME=str(folder / "home"))
    logged = {name: next((folder / "out").rglob(f"samples_{name}_*.jsonl")) for name in ("local_choice", "local_text")}
    return {name: [json.loads(line) for line in path.read_text().splitlines()] for name, path in logged.items()}


def test_lm_eval_choice_scores_equal_those_of_the_engine(samples: dict[str, list[dict[str, Any]]], llm: LLM) -> None:
    """By `echo` with `logprobs`, one choice a request."""
    assert len(samples["local_choice"]) == len(CHOICES)
    for sample in samples["local_choice"]:
        document = sample["doc"]
        start = len(llm.generate(document["question"], SamplingParams(max_tokens=1))[0].prompt_token_ids)
        expected = []
        for choice in document["choices"]:
            scored = llm.generate(document["question"] + choice, SamplingParams(max_tokens=1, prompt_logprobs=1))[0].prompt_logprobs
            assert scored is not None
            expected.append(sum(one.logprob for one in scored[start:] if one is not None))
        assert [float(answer[0][0]) for answer in sample["resps"]] == pytest.approx(expected, rel=1e-6)
        assert sample["acc"] == float(expected.index(max(expected)) == document["answer"])


def test_lm_eval_gets_the_texts_of_the_engine(samples: dict[str, list[dict[str, Any]]]) -> None:
    assert [sample["resps"][0][0] for sample in samples["local_text"]] == [sample["doc"]["expected"] for sample in samples["local_text"]]
    assert [sample["exact_match"] for sample in samples["local_text"]] == [1.0] * len(CHOICES)


def test_schemathesis_finds_no_request_with_a_server_error(clients: Path, server: Server, tmp_path: Path) -> None:
    command = ["-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--checks", "not_a_server_error", "--max-examples", "40"]
    command += ["--header", f"Authorization: Bearer {KEY}", "--seed", "20260101", "--workers", "1", "--request-timeout", "60", "--no-color"]
    report = called(
        clients, *command, "--generation-database", "none", cwd=tmp_path, HYPOTHESIS_STORAGE_DIRECTORY=str(tmp_path)
    )  # 1 = a check failed
    assert "/v1/chat/completions" in report
    with server.client(Authorization=f"Bearer {KEY}") as client:
        assert client.get("/health").status_code == 200
        assert httpx.codes.is_success(client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 2}).status_code)

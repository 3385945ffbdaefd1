"""Every peer, in its own environment, writes the mini's greedy text in each of its modes (make test-clients)."""

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.parity import greedy_margin
from paceline import LLM, SamplingParams
from paceline.benchmarking.peers import PEERS, environment_python, make_environment

NUM_TOKENS = 60
NEAR_TIE = 0.05  # of a logit: what other kernels, or a cache in half precision, can turn around
PROMPTS = (
    "<|im_start|>user\nI would like to book a table for two.<|im_end|>\n<|im_start|>assistant\n",
    "def add(a, b):\n    return a + b\n\ndef ",
)
CASES = [(name, mode) for name, peer in PEERS.items() for mode in peer.modes]


@pytest.fixture(scope="module")
def ours(mini_dir: Path) -> Iterator[LLM]:
    with LLM(str(mini_dir), dtype="f32", drafter="none", max_model_len=512) as llm:
        yield llm


def ask(command: list[str], orders: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines = "".join(json.dumps(order) + "\n" for order in orders)
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_peer_text_equals_ours_up_to_near_ties(
    name: str, mode: str, ours: LLM, mini_dir: Path, clients: Path, tally: "Counter[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, twice each prompt, so that what is kept of a request would show."""
    monkeypatch.setenv("PACELINE_CACHE", str(clients.absolute()))
    make_environment(PEERS[name])
    python = environment_python(PEERS[name])
    first = {
        "model": str(mini_dir), "draft": str(mini_dir / "draft"), "mode": mode, "threads": 2, "num_speculative_tokens": None,
        "context": 512, "precision": "f32",
    }  # fmt: skip
    prompts = [ours.tokenizer.encode(text) for text in PROMPTS]
    orders = [{"prompt_ids": ids, "max_tokens": NUM_TOKENS, "temperature": 0, "seed": 0} for ids in prompts * 2]
    ready, *answers = ask([str(python), str(PEERS[name].worker)], [first, *orders])
    assert ready.get("ready"), ready
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    for ids, answer, again in zip(prompts, answers[:2], answers[2:], strict=True):
        assert answer["token_ids"] == again["token_ids"], answer
        wanted = list(ours.generate([ids], params)[0].token_ids)
        same = next((index for index, pair in enumerate(zip(answer["token_ids"], wanted, strict=True)) if pair[0] != pair[1]), NUM_TOKENS)
        tally[f"tokens of {name} ({mode}) that are ours, of {NUM_TOKENS * len(prompts)}"] += same
        assert same == NUM_TOKENS or greedy_margin(ours, ids + wanted[:same]) < NEAR_TIE, (same, answer["token_ids"])
        assert (
            mode == "plain" or answer["num_draft_tokens"] is None or answer["num_draft_tokens"] >= (answer["num_accepted_tokens"] or 0) > 0
        ), answer


def test_peer_worker_reports_an_unsupported_mode_as_one_error(clients: Path, mini_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(clients.absolute()))
    for peer in PEERS.values():
        make_environment(peer)
        order = {"model": str(mini_dir), "draft": None, "mode": "mtp", "threads": 1, "num_speculative_tokens": None, "context": 64}
        (answer,) = ask([str(environment_python(peer)), str(peer.worker)], [order | {"precision": "f32"}])
        assert "mtp" in answer["error"], answer


def test_llama_cpp_runs_every_gguf_type_that_paceline_writes(
    clients: Path, mini_dir: Path, monkeypatch: pytest.MonkeyPatch, tally: "Counter[str]"
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(clients.absolute()))
    peer = PEERS["llama.cpp"]
    make_environment(peer)
    for precision in ("bf16", "int8", "int4", "q4_k_m"):
        first = {"model": str(mini_dir), "draft": None, "mode": "plain", "threads": 2, "num_speculative_tokens": None, "context": 128}
        request = {"prompt_ids": [1, 290, 201], "max_tokens": 8, "temperature": 0, "seed": 0}
        ready, answer = ask([str(environment_python(peer)), str(peer.worker)], [first | {"precision": precision}, request])
        assert ready["ready"]
        assert len(answer["token_ids"]) == 8
        tally["types of GGUF file that llama.cpp runs"] += 1

"""Two public models from PyPI, SmolLM2-135M-Instruct (Q4_1) and Gemma 3 270M (Q4_K_M), compute what others compute with their files.

transformers (which dequantises a GGUF file) and llama.cpp live in environments of their own (make test-clients).
"""

import json
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from clients.run_foreign import run_foreign
from harness.parity import count_equal_texts
from paceline import LLM, SamplingParams
from paceline.cli import app

MODELS = ("smollm2", "gemma")
NUM_TOKENS, LEAST_PROMPT, MOST_PROMPT = 32, 40, 120
NEAR_TIE = 0.02  # of a logit: what another order of a sum can turn around
TEXT_TOKENS = 96


@pytest.fixture(scope="module")
def models(clients: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files by name."""
    found: dict[str, str] = ask_transformers(clients, what="models", folder=str(tmp_path_factory.mktemp("gemma")))
    return found


def ask_transformers(clients: Path, **order: object) -> Any:
    return ask(clients / "real-models", "transformers_gguf.py", order)


def ask(environment: Path, script: str, order: object) -> Any:
    """Run a script; both sides write JSON."""
    return json.loads(run_foreign(environment, script, given=json.dumps(order)).splitlines()[-1])


def conversations() -> list[list[dict[str, str]]]:
    """The prompts of `paceline bench`, 32 of four kinds, as conversations."""
    folder = files("paceline") / "benchmarking" / "workloads"
    kinds = ("chat", "code", "arithmetic", "json")
    records = [json.loads(line) for kind in kinds for line in (folder / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()]
    return [one.get("messages") or [{"role": "user", "content": one["prompt"]}] for one in records]


def prompts_of(llm: LLM) -> list[list[int]]:
    """Tokens of the conversations; without a chat template of three texts each, which are long enough for llama.cpp's BLAS."""
    if llm.tokenizer.has_chat_template:
        found = [llm.tokenizer.encode(llm.tokenizer.render_chat(one), add_special_tokens=False) for one in conversations()]
    else:
        texts = [one[-1]["content"] for one in conversations()]
        found = [llm.tokenizer.encode(f"{text}\n\n{texts[index - 1]}\n\n{texts[index - 2]}") for index, text in enumerate(texts)]
    assert min(map(len, found)) >= LEAST_PROMPT
    return [one[:MOST_PROMPT] for one in found]


@pytest.mark.parametrize("name", MODELS)
def test_float32_greedy_texts_equal_those_of_transformers(name: str, models: dict[str, str], clients: Path, tally: "Counter[str]") -> None:
    with LLM(models[name], dtype="f32", max_model_len=512, threads=2, drafter="ngram") as llm:
        prompts = prompts_of(llm)[::4]
        others = ask_transformers(clients, what="greedy", file=models[name], prompts=prompts, max_tokens=NUM_TOKENS)
        num_equal = count_equal_texts(llm, prompts, others, NUM_TOKENS, NEAR_TIE)
    assert num_equal >= len(prompts) - 1
    tally[f"texts of {name} that are those of transformers, of {len(prompts)}"] += num_equal


@pytest.mark.parametrize("name", MODELS)
def test_float32_greedy_texts_equal_those_of_llama_cpp(name: str, models: dict[str, str], clients: Path, tally: "Counter[str]") -> None:
    with LLM(models[name], dtype="f32", max_model_len=512, threads=2, drafter="ngram") as llm:
        prompts = prompts_of(llm)
        order = {"file": models[name], "prompts": prompts, "max_tokens": NUM_TOKENS, "threads": 2}
        others = ask(clients / "llama-cpp", "llama_greedy.py", order)
        num_equal = count_equal_texts(llm, prompts, others, NUM_TOKENS, NEAR_TIE)
    assert num_equal >= 0.9 * len(prompts)
    tally[f"texts of {name} that are those of llama.cpp, of {len(prompts)}"] += num_equal


@pytest.mark.parametrize("name", MODELS)
def test_default_log_probabilities_are_nearer_to_float32_than_those_of_llama_cpp(
    name: str, models: dict[str, str], clients: Path, tmp_path: Path, tally: "Counter[str]"
) -> None:
    params = SamplingParams(max_tokens=TEXT_TOKENS, temperature=0.7, seed=1, ignore_eos=True)
    with LLM(models[name], dtype="f32", max_model_len=512, threads=2) as llm:
        prompts = prompts_of(llm)[::8]
        texts = [[*prompt, *output.token_ids] for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True)]
        exact = np.concatenate([log_probabilities(llm, text) for text in texts])
    with LLM(models[name], max_model_len=512, threads=2) as llm:
        ours = np.concatenate([log_probabilities(llm, text) for text in texts])
    theirs = np.concatenate([llama_cpp_log_probabilities(clients, models[name], text, tmp_path) for text in texts])
    errors = [abs(ours - exact).mean(), abs(theirs - exact).mean()]
    for program, error in zip(("paceline", "llama.cpp"), errors, strict=True):
        tally[f"mean error of log-probabilities of {name} in millionths, {program}"] += round(1e6 * error)
    assert errors[0] < errors[1]


def llama_cpp_log_probabilities(clients: Path, file: str, token_ids: list[int], folder: Path) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the log-probability of each token but the first, computed as llama.cpp generates: one token a pass."""
    given, found = folder / "ids.json", folder / "logits.npy"
    given.write_text(json.dumps(token_ids), encoding="utf-8")
    run_foreign(clients / "llama-cpp", "llama_logits.py", file, given, found, "as-when-decoding")
    logits = np.load(found).astype(np.float64)
    log_probs: np.ndarray[Any, np.dtype[np.float64]] = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    return log_probs[np.arange(len(token_ids) - 1), token_ids[1:]]


def log_probabilities(llm: LLM, token_ids: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the log-probability of each token but the first."""
    (output,) = llm.generate([token_ids], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    return np.array([one.logprob for one in output.prompt_logprobs if one is not None], np.float64)


def test_chat_template_of_the_file_gives_the_tokens_of_transformers(models: dict[str, str], clients: Path) -> None:
    given = [*conversations(), [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]]
    given.append(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Who are you?"}]
    )
    with LLM(models["smollm2"], max_model_len=512) as llm:
        ours = [llm.tokenizer.encode(llm.tokenizer.render_chat(one), add_special_tokens=False) for one in given]
    assert ours == ask_transformers(clients, what="chat", file=models["smollm2"], conversations=given)


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "auto", "the other model"])
@pytest.mark.parametrize("name", MODELS)
def test_prove_finds_no_difference(name: str, drafter: str, models: dict[str, str], tally: "Counter[str]") -> None:
    other = models[MODELS[1 - MODELS.index(name)]]
    options = ["--draft-model", other] if drafter == "the other model" else ["--drafter", drafter]
    done = CliRunner().invoke(app, ["prove", models[name], "--quick", *options])
    assert done.exit_code == 0, done.output[-3000:]
    tally["proofs on public models"] += 1

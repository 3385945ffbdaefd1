"""Every code block of README.md and docs/ runs as it is written, in a folder where the names in it mean tiny models."""

import contextlib
import io
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from draw_imports import REPOSITORY
from harness.adapter_files import low_rank, write_adapter
from harness.block_checkpoints import write_random_block
from harness.checkpoints import write_byte_level_tokenizer, write_checkpoint
from harness.eagle_checkpoints import EAGLE3, eagle3_tensors, write_head
from harness.gemma4_assistants import CLUSTERS, write_assistant, write_target
from harness.gguf_checkpoints import byte_level_vocabulary, write_gguf
from harness.medusa_checkpoints import random_heads, write_heads
from harness.mtp_checkpoints import add_module, random_module
from harness.pard2_checkpoints import write_pard2
from harness.xlora_files import write_xlora
from paceline.cli import app
from paceline.models.checkpoint import read_model_config

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [str(path.relative_to(REPOSITORY)) for path in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]]
# environments and downloads; a server does not end by itself (tests/e2e/server); measuring, proving and training take minutes
# (test_bench.py, test_prove.py, tests/unit/training)
NOT_RUN_HERE = ("make ", "pip ", "mkdir ", "paceline serve", "paceline bench", "paceline prove", "paceline train", "python tools/")
CLIENT = "python client"  # code for another environment, such as an API's own client
SMALL = {"num_hidden_layers": 2}


def blocks_of(page: str) -> list[tuple[str, str]]:
    """Language and content of each."""
    return FENCE.findall((REPOSITORY / page).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages name. A name is looked for here before anybody asks a hub for it."""
    root = tmp_path_factory.mktemp("pages")
    target = write_checkpoint(root / "path/to/model", "llama", **SMALL)
    rng = np.random.default_rng(0)
    queries = [low_rank(rng, f"model.layers.{layer}.self_attn.q_proj", (64, 64)) for layer in range(SMALL["num_hidden_layers"])]
    for adapter in ("path/to/adapter", "path/to/draft-adapter"):
        write_adapter(root / adapter, {name: one for own in queries for name, one in own.items()})
    write_xlora(root / "path/to/x-lora", read_model_config(target), seed=1)
    (root / "path/to/heads").mkdir()
    for name in (
        "path/to/draft-model",
        "Qwen/Qwen2.5-0.5B-Instruct",
        "Qwen/Qwen2.5-1.5B-Instruct",
        "lmsys/vicuna-7b-v1.3",
        "path/to/Qwen3-8B",
        "Qwen/Qwen3-0.6B",
        "Qwen/Qwen3-8B",
    ):
        shutil.copytree(target, root / name)
    spec = {**EAGLE3, "hidden_size": 64, "intermediate_size": 96}
    for name, head, num_layers, layers in (
        ("target", "head", 30, [2, 16, 29]),
        ("meta-llama/Llama-3.1-8B-Instruct", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", 4, [1, 2, 3]),
    ):
        write_checkpoint(root / name, "llama", num_hidden_layers=num_layers)
        write_head(root / head, {**spec, "eagle_aux_hidden_state_layer_ids": layers}, eagle3_tensors(spec, target_hidden=64))
    write_heads(root / "FasterDecoding/medusa-vicuna-7b-v1.3", "rows", random_heads(num_heads=4))
    write_target(root / "google/gemma-4-E2B-it")
    write_assistant(root / "google/gemma-4-E2B-it-assistant", **CLUSTERS)
    add_module(write_checkpoint(root / "DIRECTORY", "qwen3", **SMALL), "mtp", random_module(), num_layers=2)
    bytes_only = write_byte_level_tokenizer(write_checkpoint(root / "gguf", "llama", vocab_size=263, **SMALL))
    for name in ("model-Q4_0.gguf", "my-model.gguf"):
        metadata = {**byte_level_vocabulary(bytes_only), "tokenizer.chat_template": "{{ messages[-1].content }}"}
        write_gguf(bytes_only, root / name, "Q4_0", metadata=metadata)
    long = write_byte_level_tokenizer(write_checkpoint(root / "long", "llama", vocab_size=263, max_position_embeddings=2048, **SMALL))
    vocabulary = byte_level_vocabulary(long)
    write_gguf(long, root / "smollm2.gguf", "Q4_0", metadata={**vocabulary, "tokenizer.chat_template": "{{ messages[-1].content }}"})
    write_gguf(long, root / "gemma.gguf", "Q4_0", metadata=vocabulary)  # a base model
    for name, block, markov in (
        ("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16", None),
        ("LiquidAI/LFM2.5-1.2B-Instruct", "LiquidAI/LFM2.5-1.2B-Instruct-DSpark", "vanilla"),
    ):
        write_checkpoint(root / name, "llama", num_hidden_layers=3)
        write_random_block(root / block, markov=markov)
    write_pard2(root / "amd/PARD2-Qwen3-8B")
    asked = {"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hello", "max_tokens": 4}}
    (root / "requests.jsonl").write_text(json.dumps(asked) + "\n")
    for name in ("my-prompts.jsonl", "half-a.jsonl"):
        (root / name).write_text('{"prompt": "Hello"}\n{"messages": [{"role": "user", "content": "Hello"}]}\n')
    errors = root / "src/paceline/errors.py"
    errors.parent.mkdir(parents=True)
    shutil.copy(REPOSITORY / errors.relative_to(root), errors)
    return root


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "1")  # the commands set it if it is unset; monkeypatch restores it


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_of_documentation_pages_have_a_language(page: str) -> None:
    """Text is for what is no code: it does not run. A client's code is compiled alone."""
    assert {language for language, _ in blocks_of(page)} <= {"python", "sh", "text", CLIENT}
    for language, content in blocks_of(page):
        if language == CLIENT:
            compile(content, page, "exec")
    text = "\n".join(content for language, content in blocks_of(page) if language == "text")
    assert not re.search(r"^\s*(paceline |pip |make |import |from \w+ import )", text, re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if any(language == "python" for language, _ in blocks_of(page))])
def test_python_examples_of_documentation_pages_run(here: None, page: str) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for language, content in blocks_of(page):
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(content, page, "exec"), namespace)


COMMANDS = {
    line: None
    for page in PAGES
    for language, content in blocks_of(page)
    for line in content.replace("\\\n", " ").splitlines()
    if language == "sh" and line.strip() and not line.startswith(NOT_RUN_HERE) and "--fetch" not in line  # test_doctor_fetch.py
}


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_of_documentation_pages_run(here: None, line: str) -> None:
    program, *arguments = shlex.split(line, comments=True)
    assert program == "paceline"
    done = CliRunner().invoke(app, arguments, input="Hello\n")
    assert done.exit_code == 0, done.output

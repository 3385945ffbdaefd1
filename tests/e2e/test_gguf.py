"""A GGUF file is a model like any other: `LLM` and the command take it, and it gives the text of the directory it was made from."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.always_drafts import draft_always
from harness.gguf_checkpoints import byte_level_vocabulary, write_gguf
from paceline import LLM, SamplingParams
from paceline.errors import CheckpointError, ConfigError

pytest.importorskip("gguf")

PROMPTS = ["Once upon a time", "def fibonacci(n):", "The capital of France is"]
PARAMS = SamplingParams(max_tokens=24, temperature=0.7, seed=1)
Mini = Callable[[str], Path]


@pytest.fixture(scope="module")
def mini_gguf(mini_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Mini:
    """The mini target as a GGUF file of one block type, alone in its folder."""
    made: dict[str, Path] = {}

    def make(block_type: str) -> Path:
        if block_type not in made:
            path = tmp_path_factory.mktemp(block_type) / "mini.gguf"
            made[block_type] = write_gguf(mini_dir, path, block_type, metadata=byte_level_vocabulary(mini_dir))
        return made[block_type]

    return make


def texts(model: Path, **options: str) -> list[tuple[int, ...]]:
    llm = LLM(str(model), threads=2, max_model_len=256, **options)
    return [tuple(llm.generate(prompt, PARAMS)[0].token_ids) for prompt in PROMPTS]


def test_a_bf16_file_gives_the_tokens_of_the_directory(mini_gguf: Mini, mini_dir: Path) -> None:
    expected = texts(mini_dir, drafter="none")
    assert texts(mini_gguf("BF16").parent, drafter="ngram") == expected


def test_a_quantised_file_gives_the_same_tokens_with_and_without_a_drafter(mini_gguf: Mini, mini_dir: Path) -> None:
    expected = texts(mini_gguf("Q8_0"), drafter="none")
    assert texts(mini_gguf("Q8_0"), drafter="ngram") == expected
    assert all(expected)


def test_a_gguf_file_can_be_the_draft_model(mini_gguf: Mini, mini_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)
    llm = LLM(str(mini_dir), threads=2, max_model_len=256, drafter=str(mini_gguf("Q8_0")))
    output = llm.generate(PROMPTS[0], SamplingParams(max_tokens=24, temperature=0))[0]
    assert output.speculation.mean_acceptance_length > 2


def test_regrouped_weights_run(mini_gguf: Mini) -> None:
    assert all(texts(mini_gguf("Q4_0"), gguf_weights="regroup", drafter="none"))


def test_settings_that_cannot_be_are_errors(mini_gguf: Mini) -> None:
    with pytest.raises(ConfigError, match="gguf_weights is 'fast': use one of exact, regroup"):
        LLM(str(mini_gguf("Q8_0")), gguf_weights="fast")
    with pytest.raises(CheckpointError, match=r"has no GGUF file 'other\.gguf'; it holds mini\.gguf"):
        LLM(str(mini_gguf("Q8_0").parent), gguf_file="other.gguf")

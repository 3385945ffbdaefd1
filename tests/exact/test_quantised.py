"""Promise 1 with quantised and GGUF targets and drafts: their tokens are those of their own plain decoding."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.gguf_checkpoints import byte_level_vocabulary, write_gguf
from paceline import LLM, SamplingParams
from paceline.runtimes.native.library import kernels_path
from paceline.speculation.draft_length.policy import FixedDraftLength

TARGETS = ["int8", "int4", "BF16", "Q4_0", "Q8_0", "Q5_1", "Q4_1"]
DRAFTERS = ["ngram", "suffix", "draft_model", "quantised draft", "draft from GGUF"]
IN_A_NORMAL_RUN = ("int8", "Q4_0")  # from a directory and from files, with every drafter
SAMPLINGS = {
    "greedy": SamplingParams(),
    "top-p": SamplingParams(temperature=0.7, top_p=0.9, seed=5),
    "penalties": SamplingParams(temperature=1.3, top_k=30, repetition_penalty=1.2, frequency_penalty=0.3, seed=6),
}
Files = Callable[[str], Path]


@pytest.fixture(scope="module")
def file_of(mini_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The mini (or, by "draft/KIND", its draft model) as a GGUF file of one block type; int8 and int4 are the directory."""
    pytest.importorskip("gguf")
    root = tmp_path_factory.mktemp("gguf")

    def file(kind: str) -> Path:
        if kind.startswith("int"):
            return mini_dir
        part, _, block_type = kind.rpartition("/")
        path = root / f"{part}{block_type}.gguf"
        if not path.is_file():
            write_gguf(mini_dir / part, path, block_type, metadata=byte_level_vocabulary(mini_dir / part))
        return path

    return file


def open_llm(file_of: Files, mini_dir: Path, target: str, drafter: str = "none") -> LLM:
    names = {
        "draft_model": str(mini_dir / "draft"),
        "quantised draft": str(mini_dir / "draft"),
        "draft from GGUF": str(file_of("draft/Q8_0")),
    }
    llm = LLM(
        str(file_of(target)),
        quantization=target if target.startswith("int") else "none",
        drafter=names.get(drafter, drafter),
        draft_quantization="int8" if drafter == "quantised draft" else "none",
        threads=2,
        max_model_len=512,
        kv_cache_gb=0.2,
        offline=True,
    )
    llm.engine.speculator.policy = FixedDraftLength(4)
    return llm


@pytest.mark.parametrize("target", [pytest.param(one, marks=[] if one in IN_A_NORMAL_RUN else pytest.mark.long) for one in TARGETS])
def test_drafts_change_no_token_of_a_quantised_target(
    file_of: Files, mini_dir: Path, target: str, large_counts: bool, seed: int, tally: Counter[str]
) -> None:
    if kernels_path() is None:
        pytest.skip("exact only with our own kernels")
    random = np.random.default_rng(seed)
    prompts = [random.integers(3, 4096, length).tolist() for length in (1, 31, 40)]
    max_tokens = 64 if large_counts else 9
    params = [replace(one, max_tokens=max_tokens, ignore_eos=True, seed=index) for index, one in enumerate(SAMPLINGS.values())]
    plain = open_llm(file_of, mini_dir, target)
    assert plain.numerics == "exact"
    expected = [[output.token_ids for output in plain.generate(prompts, one)] for one in params]
    for drafter in DRAFTERS if large_counts else DRAFTERS[TARGETS.index(target) % 2 :: 2]:
        llm = open_llm(file_of, mini_dir, target, drafter)
        drafted = 0
        for one, answers in zip(params, expected, strict=True):
            together = llm.generate(prompts, one)
            alone = llm.generate(prompts[:1], one)
            assert [output.token_ids for output in together] == answers, drafter
            assert alone[0].token_ids == answers[0], drafter
            drafted += sum(output.speculation.num_draft_tokens for output in together)
            tally["token ids equal to plain decoding of a quantised target"] += max_tokens * (len(prompts) + 1)
        assert drafted > 0 or drafter in ("ngram", "suffix")

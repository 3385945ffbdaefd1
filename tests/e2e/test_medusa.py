"""The Medusa drafter with a target: its kinds of trees, and targets with heads inside."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.checkpoints import write_checkpoint
from harness.loaded_targets import load_target
from harness.medusa_checkpoints import perfect_heads, random_heads, write_heads, write_successor_target
from paceline import LLM, SamplingParams
from paceline.config import SpeculationConfig
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.medusa.drafter import MedusaDrafter, open_medusa

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9], list(range(1, 80)), [31, 2]]
pytestmark = pytest.mark.usefixtures("always_drafts")


def open_llm(target: Path, drafter: str | MedusaDrafter, num_speculative_tokens: int = 3, **options: object) -> LLM:
    return LLM(
        str(target),
        drafter=drafter,
        num_speculative_tokens=num_speculative_tokens,
        threads=2,
        max_model_len=256,
        kv_cache_gb=0.05,
        backend="native",
        **options,
    )  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def successor_target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NDArray[np.int64]]:
    return write_successor_target(tmp_path_factory.mktemp("successor"), sharpness=3.0)


@pytest.mark.parametrize("tree", ["probability", "accuracy", "mc_sim_7b_63"])
def test_medusa_tree_of_each_kind_accepts_the_right_path(
    successor_target: tuple[Path, NDArray[np.int64]], tmp_path: Path, tree: str
) -> None:
    target, successor = successor_target
    files = HeadFiles.open(write_heads(tmp_path, "rows", perfect_heads(successor, 4)))
    drafter = open_medusa(files, load_target(target, SpeculationConfig(drafter_options={"tree": tree})))
    llm = open_llm(target, drafter, num_speculative_tokens=4, tree_width=4)
    for params in (GREEDY, SAMPLED):
        for output, prompt in zip(llm.generate(PROMPTS, params), PROMPTS, strict=True):
            assert output.token_ids == follow(successor, prompt, 40)
            assert output.speculation.steps == 1 + (8 if tree != "mc_sim_7b_63" else 10)  # its fourth level begins after 40 nodes
            assert output.speculation.num_draft_tokens > 2 * output.speculation.num_accepted_tokens  # it was a tree


def follow(successor: NDArray[np.int64], prompt: Sequence[int], count: int) -> list[int]:
    tokens = [prompt[-1]]
    for _ in range(count):
        tokens.append(int(successor[tokens[-1]]))
    return tokens[1:]


def test_model_file_with_medusa_heads_runs_without_them(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    before = open_llm(target, "none").generate(PROMPTS, GREEDY)
    write_heads(target, "whole", random_heads())
    llm = open_llm(target, "none")
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == [output.token_ids for output in before]
    assert any("holds a drafting head: drafter='medusa'" in notice for notice in llm.notices)

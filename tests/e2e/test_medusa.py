"""The Medusa drafter: with a target: heads that must be right are right every time, and no head changes a token."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.checkpoints import VOCAB_SIZE, write_checkpoint
from harness.loaded_targets import load_target
from harness.medusa_checkpoints import perfect_blocks, perfect_heads, random_heads, write_heads, write_successor_target
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


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("layout", ["rows", "rows_pt", "tgi", "whole", "vllm", "vllm_map"])
def test_heads_that_must_be_right_are_accepted_always(
    successor_target: tuple[Path, NDArray[np.int64]], tmp_path: Path, layout: str, params: SamplingParams
) -> None:
    target, successor = successor_target
    arrays = perfect_blocks(successor) if layout == "tgi" else perfect_heads(successor, sharpness=3.0)
    token_map = None
    if layout == "vllm_map":  # rows in another order, named by the map
        token_map = np.random.default_rng(1).permutation(VOCAB_SIZE)
        arrays = {name: array if ".linear." in name else array[token_map] for name, array in arrays.items()}
    wanted = tmp_path
    if layout == "whole":
        target, _ = write_successor_target(tmp_path, sharpness=3.0)
    write_heads(wanted, layout, arrays, token_map=token_map)
    llm = open_llm(target, "medusa" if layout == "whole" else str(wanted))
    plain = [follow(successor, prompt, params.max_tokens) for prompt in PROMPTS]
    for batch in (PROMPTS, PROMPTS[:1]):
        for output, answer in zip(llm.generate(batch, params), plain, strict=False):
            assert output.token_ids == answer
            assert output.speculation.steps == 1 + 10  # the prompt's, and 39 tokens, four a step


@pytest.mark.parametrize("tree", ["probability", "accuracy", "mc_sim_7b_63"])
def test_the_right_path_of_a_tree_is_accepted_always(successor_target: tuple[Path, NDArray[np.int64]], tmp_path: Path, tree: str) -> None:
    target, successor = successor_target
    files = HeadFiles.open(write_heads(tmp_path, "rows", perfect_heads(successor, 4)))
    drafter = open_medusa(files, load_target(target, SpeculationConfig(drafter_options={"tree": tree})))
    llm = open_llm(target, drafter, num_speculative_tokens=4, tree_width=4)
    for params in (GREEDY, SAMPLED):
        for output, prompt in zip(llm.generate(PROMPTS, params), PROMPTS, strict=True):
            assert output.token_ids == follow(successor, prompt, 40)
            assert output.speculation.steps == 1 + (8 if tree != "mc_sim_7b_63" else 10)  # its fourth level begins behind 40 nodes
            assert output.speculation.num_draft_tokens > 2 * output.speculation.num_accepted_tokens  # it was a tree


@pytest.mark.parametrize("shift", [-1, 1])
def test_heads_shifted_by_one_are_never_accepted(successor_target: tuple[Path, NDArray[np.int64]], tmp_path: Path, shift: int) -> None:
    target, successor = successor_target
    write_heads(tmp_path, "rows", perfect_heads(successor, shift=shift))
    for output, prompt in zip(open_llm(target, str(tmp_path)).generate(PROMPTS, GREEDY), PROMPTS, strict=True):
        assert output.token_ids == follow(successor, prompt, 40)
        assert output.speculation.num_draft_tokens > 40
        assert output.speculation.num_accepted_tokens == 0


def follow(successor: NDArray[np.int64], prompt: Sequence[int], count: int) -> list[int]:
    tokens = [prompt[-1]]
    for _ in range(count):
        tokens.append(int(successor[tokens[-1]]))
    return tokens[1:]


@pytest.mark.parametrize(("tree_width", "quantization"), [(1, "int8"), (3, "none")])
def test_token_ids_are_those_of_plain_decoding(tmp_path: Path, tree_width: int, quantization: str) -> None:
    target = write_checkpoint(tmp_path / "target", "qwen3", num_hidden_layers=2)
    heads = write_heads(tmp_path / "heads", "rows", random_heads(num_heads=4))
    plain, drafting = open_llm(target, "none"), open_llm(target, str(heads), tree_width=tree_width, draft_quantization=quantization)
    for params in (GREEDY, SAMPLED, SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=4)):
        answers = [output.token_ids for output in plain.generate(PROMPTS, params)]
        together = drafting.generate(PROMPTS, params)
        assert [output.token_ids for output in together] == answers
        assert drafting.generate(PROMPTS[:1], params)[0].token_ids == answers[0]
        assert sum(output.speculation.num_draft_tokens for output in together) > 40


def test_a_target_with_heads_inside_runs_without_them(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    before = open_llm(target, "none").generate(PROMPTS, GREEDY)
    write_heads(target, "whole", random_heads())
    llm = open_llm(target, "none")
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == [output.token_ids for output in before]
    assert any("holds a drafting head: drafter='medusa'" in notice for notice in llm.notices)

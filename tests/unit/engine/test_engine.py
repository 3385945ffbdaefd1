"""Who runs when, and that whoever waits or takes guesses never costs another request its memory."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from checkpoints import write_checkpoint
from paceline import LLM, SamplingParams
from paceline.kv_cache.row_plan import blocks_for
from paceline.speculation import step as step_module
from paceline.speculation.draft_length import DraftLengthPolicy
from paceline.speculation.drafter import DraftBudget, Drafter
from paceline.speculation.request import Request
from paceline.speculation.stats import PlainReason
from paceline.speculation.tree import DraftTree

pytest.importorskip("openvino")

BLOCK_BYTES = 16384
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9] * 30, [30, 31], [8] * 31, [11, 12] * 40]


class BushyDrafter(Drafter):
    """Two guesses side by side: the path of the second takes blocks of its own, beyond what its request was admitted with."""

    name = "bushy"

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        return [DraftTree.grow(r.token_ids[-1], [40, 41], [0, 0], self.name) for r in requests]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=2)


def open_llm(directory: Path, num_blocks: int, drafter: str | Drafter = "none", **options: int | str) -> LLM:
    return LLM(str(directory), threads=2, device="cpu", drafter=drafter, cache_gb=(num_blocks + 1.5) * BLOCK_BYTES / 1e9, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def solo(directory: Path) -> list[list[int]]:
    llm = open_llm(directory, 40)
    return [llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def solo_on_paths(directory: Path) -> list[list[int]]:
    llm = open_llm(directory, 40, backend="openvino")
    return [llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[list[Request]]:
    """The requests of every step."""
    seen: list[list[Request]] = []
    real = step_module.step

    def remembering(requests: Sequence[Request], *args: object, **options: object) -> None:
        seen.append(list(requests))
        real(requests, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("paceline.engine.engine.step", remembering)
    return seen


def test_no_more_run_at_once_than_may_and_all_come_to_an_end(directory: Path, solo: list[list[int]], steps: list[list[Request]]) -> None:
    llm = open_llm(directory, 40, max_num_seqs=2)
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == solo
    assert max(map(len, steps)) == 2


def test_a_request_is_admitted_when_the_longest_it_may_become_fits(
    directory: Path, solo: list[list[int]], steps: list[list[Request]]
) -> None:
    llm = open_llm(directory, 4, max_context=110)
    assert llm.engine.cache.pool.num_blocks == 5
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == solo
    for requests in steps:
        assert sum(blocks_for(request.max_len, 32) for request in requests) <= 4
    assert max(map(len, steps)) > 1


@pytest.mark.parametrize("num_blocks", [4, 5, 6, 7, 9, 40])
def test_guesses_never_take_the_blocks_of_another_requests_own_tokens(
    directory: Path, solo_on_paths: list[list[int]], num_blocks: int
) -> None:
    # in OpenVINO exact trees are paths, each with blocks of its own
    llm = open_llm(directory, num_blocks, BushyDrafter(), max_context=110, backend="openvino")
    llm.engine.guesser.policy = DraftLengthPolicy(4, row_budget=12)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == solo_on_paths
    without = sum(output.speculation.plain[PlainReason.NO_MEMORY] for output in outputs)
    assert without > 0 or num_blocks == 40
    assert sum(output.speculation.drafted for output in outputs) > 0
    llm.engine.cache.check()
    assert llm.engine.cache.pool.num_free == num_blocks


def test_prompts_share_a_pass_until_it_is_full_and_decoding_never_waits(
    directory: Path, steps: list[list[Request]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm(directory, 200)
    rows: list[int] = []
    forward = llm.runtime.forward
    monkeypatch.setattr(llm.runtime, "forward", lambda batch: rows.append(len(batch.token_ids)) or forward(batch))
    llm.generate([[7], [8] * 300, [9] * 300, [10] * 300], GREEDY)
    short = steps[0][0]
    assert short.num_prompt_tokens == 1
    assert all(short in requests for requests in steps[:24])
    # 256 + 44 of the first, then of the second, then of the third prompt: with one row that decodes no two chunks of 256 fit in 512
    assert rows[:5] == [1 + 256, 1 + 44 + 256, 1 + 1 + 44 + 256, 1 + 1 + 1 + 44, 4]
    assert sum(rows) == 1 + 3 * 300 + 4 * 23


def test_a_short_cache_plan_is_noticed_and_a_long_one_is_not(directory: Path) -> None:
    assert open_llm(directory, 4).max_context == 128
    assert "limits the context to 128 of the model's 512" in open_llm(directory, 4).notices[-1]
    plenty = open_llm(directory, 16)
    assert (plenty.max_context, plenty.notices) == (512, ())

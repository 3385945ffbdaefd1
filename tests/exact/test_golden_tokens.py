"""Token ids are those of a stored run, whatever drafts: a change of any part of the engine that changes a token shows here.

The ids of a target are stored once and shared by all its drafters. `PYTHONPATH=tests python -m harness.golden_targets` records them again,
which is right only where a change of tokens is intended.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness.always_drafts import draft_always
from harness.exact_targets import skip_without_kernels
from harness.golden_targets import DRAFTERS, TEMPERATURES, GoldenTarget, open_golden_llm, open_golden_target, read_golden, sampling
from paceline.speculation.draft_length.policy import FixedDraftLength

TargetOf = Callable[[str], GoldenTarget]
CASES = [(name, drafter) for name, drafters in DRAFTERS.items() for drafter in drafters]
IDS = ["-".join(case) for case in CASES]


@pytest.fixture(scope="module")
def target_of(tmp_path_factory: pytest.TempPathFactory, mini_dir: Path, request: pytest.FixtureRequest) -> TargetOf:
    @cache
    def target(name: str) -> GoldenTarget:
        skip_without_kernels()
        shared = request.getfixturevalue("shared_dir") if name == "tinystories" else None
        found = open_golden_target(name, tmp_path_factory.mktemp(name), mini_dir, shared)
        if found is None:
            pytest.skip(f"the files of {name} are not in ../shared")
        return found

    return target


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return read_golden()


@pytest.mark.spread(0.4)
@pytest.mark.parametrize(("name", "drafter"), CASES, ids=IDS)
def test_token_ids_of_a_batch_equal_the_golden_ones(
    name: str, drafter: str, target_of: TargetOf, golden: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_always(monkeypatch)
    target, stored, num_drafted = target_of(name), golden[name], 0
    with open_golden_llm(target, drafter) as llm:
        for temperature in TEMPERATURES:
            outputs = llm.generate(stored["prompts"], sampling(temperature))
            assert [output.token_ids for output in outputs] == stored[f"T={temperature}"]
            num_drafted += sum(output.speculation.num_draft_tokens for output in outputs)
        assert (num_drafted > 0) == (drafter != "none")
        assert llm.stats().drafter_failures == 0


@pytest.mark.long
@pytest.mark.parametrize(("name", "drafter"), CASES, ids=IDS)
def test_token_ids_equal_the_golden_ones_for_every_draft_length(
    name: str, drafter: str, target_of: TargetOf, golden: dict[str, Any]
) -> None:
    """By the policy in use and by fixed draft lengths, in a batch and one by one."""
    target, stored = target_of(name), golden[name]
    with open_golden_llm(target, drafter, threads=2) as llm:
        for policy in (llm.engine.speculator.policy, *map(FixedDraftLength, (1, 3, 8))):
            llm.engine.speculator.policy = policy
            for temperature in TEMPERATURES:
                expected, params = stored[f"T={temperature}"], sampling(temperature)
                outputs = llm.generate(stored["prompts"], params)
                outputs += [llm.generate([prompt], one)[0] for prompt, one in zip(stored["prompts"], params, strict=True)]
                assert [output.token_ids for output in outputs] == expected + expected
        assert llm.stats().drafter_failures == 0

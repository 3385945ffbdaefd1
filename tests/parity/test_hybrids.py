"""Networks with recurrent layers compute the logits transformers computes."""

from collections.abc import Callable

import pytest

from harness.checkpoints import write_checkpoint
from harness.hybrid_checkpoints import CASES, row_by_row
from harness.parity import Reference, check_a_prompt, make_reference

pytest.importorskip("torch")

BOUND = 1e-4
BY_BACKEND = pytest.mark.parametrize("backend", ["torch", "native"])


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    known: dict[str, Reference] = {}

    def reference(name: str) -> Reference:
        if name not in known:
            family, values = CASES[name]
            with row_by_row():
                known[name] = make_reference(write_checkpoint(tmp_path_factory.mktemp(name), family, **values))
        return known[name]

    return reference


@pytest.mark.parametrize("case", CASES)
@BY_BACKEND
def test_a_prompt_gives_the_logits_of_transformers_in_one_pass_in_chunks_and_one_by_one(
    references: Callable[[str], Reference], case: str, backend: str
) -> None:
    reference = references(case)
    check_a_prompt(reference, backend, bound=max(BOUND, 2 * reference.rounding))

"""What transformers computes for the cases of a module."""

from functools import cache

import pytest

from harness.checkpoints import write_checkpoint
from harness.parity import Reference, References, make_reference


@pytest.fixture(scope="module")
def references(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> References:
    """By the name of a case, each computed once: `CASES` of the module has its family and values of its config."""

    @cache
    def reference(name: str) -> Reference:
        family, values = request.module.CASES[name]
        return make_reference(write_checkpoint(tmp_path_factory.mktemp(name.replace(" ", "-")), family, **values))

    return reference

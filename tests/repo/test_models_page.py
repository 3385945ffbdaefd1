"""docs/models.md lists what the code runs: its tables are made from it."""

import pytest

from draw_imports import REPOSITORY
from harness.gguf_checkpoints import ARCHITECTURES
from list_models import PAGE, written
from paceline.drafters.head_kinds import HeadKind
from paceline.models.families.table import FAMILIES
from paceline.models.gguf.config import gguf_format


def test_the_tables_are_those_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page), "python tools/list_models.py --write"


def test_drafters_are_named_as_in_the_code() -> None:
    named = {name for family in FAMILIES.values() for name in (*family.bundled_drafters, *family.published_heads)}
    assert named <= {kind.value for kind in HeadKind}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_architectures_of_gguf_files_are_those_that_converters_write(family: str) -> None:
    assert ARCHITECTURES[family] == gguf_format(FAMILIES[family]).architectures[0]
    assert f"| `{family}` |" in PAGE.read_text(encoding="utf-8")


def test_the_readme_points_to_the_page() -> None:
    assert "(docs/models.md)" in (REPOSITORY / "README.md").read_text(encoding="utf-8")

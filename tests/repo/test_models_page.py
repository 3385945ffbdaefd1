"""docs/models.md lists what the code runs: its tables are made from it."""

import pytest

from harness.gguf_checkpoints import ARCHITECTURES
from list_models import BLOCKS, PAGE
from paceline.drafters.head_kinds import HeadKind
from paceline.models.families.table import FAMILIES
from paceline.models.gguf.config import gguf_format
from page_blocks import with_blocks


def test_models_page_tables_equal_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_blocks(page, BLOCKS), "python tools/list_models.py --write"


def test_drafters_in_the_family_table_are_known_head_kinds() -> None:
    named = {name for family in FAMILIES.values() for name in (*family.bundled_drafters, *family.third_party_head_methods)}
    assert named <= {kind.value for kind in HeadKind}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_gguf_architecture_names_equal_those_of_the_converters(family: str) -> None:
    assert ARCHITECTURES[family] == gguf_format(FAMILIES[family]).architectures[0]
    assert f"| `{family}` |" in PAGE.read_text(encoding="utf-8")

"""The tables of docs/server.md are made from the code."""

import pytest

from list_server_tables import BLOCKS, PAGE, TITLES, calls, served_fields
from paceline.parsing.registry import TOOL_CALL_FORMATS
from paceline.server.field_table import TABLE
from page_blocks import with_block


@pytest.mark.parametrize("name", BLOCKS)
def test_server_page_table_equals_the_code(name: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_block(page, name, BLOCKS[name]()), "python tools/list_server_tables.py --write"


def test_every_api_has_fields_in_the_server_page() -> None:
    assert set(TITLES) == set(TABLE) == {api for api, _ in served_fields()}


def test_every_tool_call_format_has_a_row_in_the_server_page() -> None:
    rows = list(calls())
    for name in TOOL_CALL_FORMATS:
        assert sum(f"`{name}`" in row.split("|")[1] for row in rows) == 1, name

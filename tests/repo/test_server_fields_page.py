"""docs/server.md lists the fields of requests: its tables are made from the code."""

from list_server_fields import PAGE, TITLES, served_fields, written
from paceline.server.field_table import TABLE


def test_tables_of_fields_are_those_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page), "python tools/list_server_fields.py --write"


def test_every_dialect_has_a_table() -> None:
    assert set(TITLES) == set(TABLE) == {dialect for dialect, _ in served_fields()}

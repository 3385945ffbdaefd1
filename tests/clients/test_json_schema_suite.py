"""The official test suite of JSON Schema: grammars never allow a value that its schema forbids, but for the cases named here."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llguidance
import pytest

from paceline.errors import RequestError
from paceline.sampling.grammars.json_schema import enforceable_schema
from paceline.sampling.grammars.unique_items import UniqueItemsState, unique_items_schema

ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MIN_COMPILED = {"draft4": 0.84, "draft6": 0.8, "draft7": 0.78, "draft2019-09": 0.72, "draft2020-12": 0.69}
ALLOWED = {
    ("ref.json", "$ref prevents a sibling $id from changing the base uri"),  # drafts 6 and 7 ignore what is next to a $ref
    ("content.json", ""),  # contentEncoding and contentMediaType are annotations
    ("ecmascript-regex.json", ""),  # Rust's \\s is Unicode's
}


class Case:
    """A schema with values that it allows or forbids."""

    def __init__(self, file: str, case: dict[str, Any], tokens: Any) -> None:
        self.file, self.name, self.schema, self.tests = file, case["description"], case["schema"], case["tests"]
        text = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(enforceable_schema(self.schema)), defaults=ONE_LINE)
        self._matcher = llguidance.LLMatcher(tokens, text, log_level=0)
        self._matcher.compute_bitmask()
        self.compiles = not self._matcher.is_error()

    def allows(self, value: object) -> bool:
        text = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
        matcher = self._matcher.deep_copy()
        if matcher.try_consume_tokens(list(text)) < len(text) or not matcher.is_accepting():
            return False
        arrays = unique_items_schema(self.schema)
        if arrays is None:
            return True
        state = UniqueItemsState(arrays)
        state.feed(text)
        return not state.has_duplicate


def compiled_cases(folder: Path, counts: Counter[str]) -> Iterator[Case]:
    tokens = llguidance.LLTokenizer("byte")
    for file in sorted([*folder.glob("*.json"), *(folder / "optional").glob("*.json")]):
        for one in json.loads(file.read_text(encoding="utf-8")):
            if not isinstance(one["schema"], dict):
                continue
            counts["schemas"] += 1
            try:
                case = Case(file.name, one, tokens)
            except (RequestError, ValueError):
                continue
            if case.compiles:
                counts["compiled"] += 1
                yield case


@pytest.mark.parametrize("draft", MIN_COMPILED)
def test_masks_never_allow_values_the_json_schema_suite_forbids(clients: Path, draft: str, tally: Any) -> None:
    folder = clients / "json-schema-suite" / "tests" / draft
    if not folder.is_dir():
        pytest.skip(f"the JSON Schema test suite is not in {folder}: make test-clients downloads it")
    counts, wrong = Counter[str](), list[tuple[str, str, str]]()
    for case in compiled_cases(folder, counts):
        for test in case.tests:
            is_allowed = case.allows(test["data"])
            counts["valid values" if test["valid"] else "invalid values"] += 1
            counts["valid values allowed"] += is_allowed and test["valid"]
            if is_allowed and not test["valid"] and not {(case.file, case.name), (case.file, "")} & ALLOWED:
                wrong.append((case.file, case.name, test["description"]))
    for name, count in counts.items():
        tally[f"{draft}, {name}"] += count
    assert wrong == []
    assert counts["compiled"] >= MIN_COMPILED[draft] * counts["schemas"]
    assert counts["valid values allowed"] >= 0.9 * counts["valid values"]  # others differ in the order of properties, or as 1.0 and 1

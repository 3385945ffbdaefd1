"""Our own tables of outputs as SGLang's detectors and mlx-lm's parsers read them (make test-clients).

The tables are mostly about faults that models make, of which the other parsers read fewer: that they find no call where we find one is
counted only. Every other difference needs a reason in `DIFFERENCES`.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients import mlx_parsers, sglang_detectors
from clients.run_foreign import run_foreign
from harness import fault_cases, markup_cases
from paceline.parsing.tools import Tool
from unit.parsing import test_json_formats, test_python_formats, test_section_formats, test_tagged_formats

TABLES = (markup_cases, test_json_formats, test_python_formats, test_section_formats, test_tagged_formats)
WITNESSES = {
    "sglang": ("sglang_detectors.py", sglang_detectors.DETECTORS.keys()),
    "mlx-lm": ("mlx_parsers.py", mlx_parsers.PARSERS.keys()),
}
"""By project: the script that runs its parsers, and our parsers of the same formats."""
_FAULTS = "it reads fewer of the faults in the output: "
DIFFERENCES = {
    ("sglang", "apertus"): "it calls with arguments that are no object",
    ("sglang", "deepseek_v31"): "it has no limit of one call",
    ("sglang", "deepseek_v32"): "it types values by the attribute that the model writes, we by the schema",
    ("sglang", "deepseek_v4"): "it types values by the attribute that the model writes, we by the schema",
    ("sglang", "gemma4"): "it reads null as a text, and keeps quotes of JSON in keys and values",
    ("sglang", "glm45"): "it reads no call without arguments, and writes the text true as Python does",
    ("sglang", "hermes"): "it keeps arguments that are a text or null, and has no limit of one call",
    ("sglang", "kimi_k3"): "it reads no arguments in one JSON section",
    ("sglang", "kimi_k2"): "it keeps arguments that are no object, and constants that are no JSON",
    ("sglang", "lfm2"): f"{_FAULTS}quotes within quotes",
    ("sglang", "llama3_json"): "it keeps arguments that are a text, and reads a call after a brace too many",
    ("sglang", "llama4_pythonic"): "it reads calls within a text; we only at its beginning",
    ("sglang", "minicpm5"): "it strips white space within CDATA, and keeps entities of XML",
    ("sglang", "minimax_m2"): f"{_FAULTS}containers as a text, a missing end tag",
    ("sglang", "minimax_m3"): "it reads elements of a union as texts, strips texts, and needs every end tag",
    ("sglang", "mistral"): f"{_FAULTS}an id between name and arguments",
    ("sglang", "pythonic"): "it reads calls within a text; we only at its beginning",
    (
        "sglang",
        "qwen3_coder",
    ): "it reads 03 as a number, a list without a schema as a text, and texts of an enum as numbers",
    ("sglang", "step3"): "it reads no call without arguments",
    ("mlx-lm", "functiongemma"): "it splits lists and objects at commas, and ignores schemas",
    ("mlx-lm", "gemma4"): f"{_FAULTS}several marks",
    ("mlx-lm", "glm45"): "it calls tools that were not offered, and needs the end tag of a value",
    ("mlx-lm", "hermes"): "it keeps arguments that are null",
    ("mlx-lm", "kimi_k2"): "it takes marks for a part of the name, keeps arguments that are no object, and reads calls within reasoning",
    ("mlx-lm", "minimax_m2"): "it reads a list without a schema as a text, needs every end tag, and reads calls within reasoning",
    ("mlx-lm", "lfm2"): f"{_FAULTS}quotes within quotes, arguments without a name",
    ("mlx-lm", "minicpm5"): "it reads a list without a schema as a text, keeps entities of XML, and needs every end tag",
    ("mlx-lm", "mistral"): "it takes the id of a call for the tool's name",
    (
        "mlx-lm",
        "muse_glimmer",
    ): "it reads calls within reasoning, keeps doubled names, strips texts, and needs every end tag",
    ("mlx-lm", "qwen3_coder"): "it reads 03 as a number and a list without a schema as a text, and needs every end tag",
}
"""Reasons, by project and parser."""
Row = dict[str, Any]


def rows() -> Iterator[Row]:
    """Our outputs with the calls that are right."""
    for table in TABLES:
        for case in table.CASES:
            called = [part for part in case.expected if part[0] == "call"]
            if getattr(case, "num_complete", None) is None:  # arguments that break off are no JSON
                yield row_of(case.formats[0], case.output, markup_cases.TOOLS, [(name, json.loads(text)) for _, name, text in called])
    for case in fault_cases.FAULT_CASES:
        yield row_of(case.parsers[0], case.output, fault_cases.TOOLS, case.calls)


def row_of(parser: str, output: str, tools: tuple[Tool, ...], calls: list[tuple[str, Any]]) -> Row:
    offered = {tool.name: tool.parameters or {} for tool in tools}
    return {"parser": parser, "output": output, "tools": offered, "calls": [list(call) for call in calls]}


@pytest.mark.parametrize("project", WITNESSES)
def test_parsers_of_other_projects_read_the_same_tool_calls(project: str, clients: Path, tally: "Counter[str]") -> None:
    folder = clients / "parsers"
    if not (folder / project).exists():
        pytest.skip("the environment of other projects' parsers is not there: make test-clients builds it")
    script, known = WITNESSES[project]
    asked = [row for row in rows() if row["parser"] in known]
    lines = run_foreign(folder, script, folder / project, given="".join(json.dumps(row) + "\n" for row in asked)).splitlines()
    unexplained = []
    for row, answer in zip(asked, map(json.loads, lines), strict=True):
        kind = "that are called alike"
        if answer.get("calls", []) != row["calls"]:
            kind = "in which only we find calls" if not answer.get("calls") else "with other calls, for a known reason"
        if kind.startswith("with other") and (project, row["parser"]) not in DIFFERENCES:
            unexplained.append((row["parser"], row["output"], answer, row["calls"]))
        tally[f"outputs of our tests {kind} by {project}"] += 1

    assert unexplained == []

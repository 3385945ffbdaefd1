"""Runs mlx-lm's own parsers of tool calls, from its wheel, on outputs given as lines of JSON.

The parsers are plain Python and get the text between their marks; the rest of mlx-lm is not imported.
Usage: `mlx_parsers.py FOLDER_OF_THE_UNPACKED_WHEEL < cases > results`.
"""

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

PARSERS = {
    "functiongemma": "function_gemma",
    "gemma4": "gemma4",
    "glm45": "glm47",
    "hermes": "json_tools",
    "kimi_k2": "kimi_k2",
    "kimi_k3": "kimi_k3",
    "lfm2": "pythonic",
    "minicpm5": "minicpm5",
    "minimax_m2": "minimax_m2",
    "mistral": "mistral",
    "muse_glimmer": "muse_spark",
    "qwen3_coder": "qwen3_coder",
}
"""mlx-lm's module for each of our parsers."""


def prepare(folder: Path) -> None:
    """Make the parsers importable without the package around them."""
    for name in ("mlx_lm", "mlx_lm.tool_parsers"):
        module = types.ModuleType(name)
        module.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = module


def blocks_of(output: str, start: str, end: str) -> list[str]:
    """Return the texts between the marks, as mlx-lm's server cuts them out of an output."""
    blocks = []
    while start in output:
        _, _, output = output.partition(start)
        block, _, output = output.partition(end) if end else (output, "", "")
        blocks.append(block)
    return blocks


def parsed(case: dict[str, Any]) -> dict[str, Any]:
    """Return what mlx-lm makes of an output."""
    module = importlib.import_module(f"mlx_lm.tool_parsers.{PARSERS[case['parser']]}")
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in case["tools"].items()]
    try:
        found: list[Any] = []
        for block in blocks_of(case["output"], module.tool_call_start, module.tool_call_end):
            calls = module.parse_tool_call(block, tools)
            found += calls if isinstance(calls, list) else [calls]
        return {"calls": [[call["name"], _arguments(call["arguments"])] for call in found]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def _arguments(given: Any) -> Any:
    return json.loads(given) if isinstance(given, str) else given


def main() -> None:
    prepare(Path(sys.argv[1]))
    for line in sys.stdin:
        sys.stdout.write(json.dumps(parsed(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

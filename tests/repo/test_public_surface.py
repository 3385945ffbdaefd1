"""What `import paceline` offers, and how little it costs."""

import json
import re
import subprocess
import sys

import pytest

import paceline
from draw_imports import REPOSITORY
from paceline import errors

PUBLIC = {
    # generate
    "LLM", "AsyncEngine", "SamplingParams", "RequestOptions", "SpeculationOptions", "Grammar", "QuantOptions",
    "StreamChunk", "RequestOutput", "Usage", "Timing",
    # read what a model wrote
    "parse_output", "ParsedOutput", "ParsedToolCall",
    # errors
    "PacelineError", "ConfigError", "CheckpointError", "IncompatibleDrafterError", "CapacityError", "RequestError",
    "BackendUnavailableError",
    "__version__",
}  # fmt: skip
HEAVY = {"torch", "transformers", "tokenizers", "scipy", "fastapi", "uvicorn", "prometheus_client"}

RUN_AND_LIST_MODULES = """
import contextlib, json, sys
sys.argv = ["paceline", *json.loads(sys.argv[1])]
with contextlib.suppress(SystemExit):
    {action}
print("\\n" + json.dumps(sorted(sys.modules)))
"""


def _loaded_libraries(action: str, *arguments: str) -> set[str]:
    command = [sys.executable, "-c", RUN_AND_LIST_MODULES.format(action=action), json.dumps(arguments)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {str(name).split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def test_the_public_names_are_these() -> None:
    assert sorted(paceline.__all__) == sorted(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_exists(name: str) -> None:
    assert getattr(paceline, name) is not None


def test_every_error_is_public_and_derives_from_one_base() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined <= PUBLIC
    assert all(issubclass(getattr(errors, name), errors.PacelineError) for name in defined)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        paceline.no_such_name  # noqa: B018


def test_importing_paceline_loads_no_heavy_library() -> None:
    assert _loaded_libraries("import paceline") & HEAVY == set()


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["serve", "--help"]], ids=" ".join)
def test_asking_for_help_loads_no_heavy_library(arguments: list[str]) -> None:
    assert _loaded_libraries("from paceline.cli import main; main()", *arguments) & HEAVY == set()


def test_the_version_is_that_of_the_project_file() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    declared = re.search(r'^version = "([^"]+)"$', project, re.MULTILINE)
    assert declared is not None
    assert paceline.__version__ == declared.group(1)


def test_types_are_shipped() -> None:
    assert (REPOSITORY / "src" / "paceline" / "py.typed").is_file()

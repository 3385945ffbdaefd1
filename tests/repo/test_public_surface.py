"""What `import paceline` offers, and how little it costs."""

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


def test_public_names_of_the_package_equal_the_expected_list() -> None:
    assert sorted(paceline.__all__) == sorted(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_name_of_the_package_exists(name: str) -> None:
    assert getattr(paceline, name) is not None


def test_all_errors_are_public_and_derive_from_paceline_error() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined <= PUBLIC
    assert all(issubclass(getattr(errors, name), errors.PacelineError) for name in defined)


def test_unknown_package_attribute_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        paceline.no_such_name  # noqa: B018


def test_import_paceline_imports_no_heavy_library() -> None:
    command = [sys.executable, "-c", "import sys, paceline; print(*sys.modules)"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert {name.split(".")[0] for name in done.stdout.split()} & HEAVY == set()


def test_package_version_equals_that_of_pyproject() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    declared = re.search(r'^version = "([^"]+)"$', project, re.MULTILINE)
    assert declared is not None
    assert paceline.__version__ == declared.group(1)


def test_package_contains_py_typed() -> None:
    assert (REPOSITORY / "src" / "paceline" / "py.typed").is_file()

"""An extra is added the way the package itself was installed: no index holds it yet."""

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from draw_imports import PACKAGE
from paceline.installation import install_command


@pytest.fixture
def installed_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the source of the package, in the form of the record that installers write next to it."""

    def installed_from(record: dict[str, Any] | None) -> None:
        directory = tmp_path / "paceline-1.0.dist-info"
        directory.mkdir()
        (directory / "METADATA").write_text("Name: paceline\nVersion: 1.0\n")
        if record is not None:
            (directory / "direct_url.json").write_text(json.dumps(record))
        monkeypatch.setattr(metadata, "distribution", lambda name: metadata.PathDistribution(directory))

    return installed_from


def test_install_hint_of_an_index_installation_names_the_package(installed_from: Any) -> None:
    installed_from(None)
    assert install_command("grammar") == "pip install 'paceline[grammar]'"


@pytest.mark.parametrize(("is_editable", "flag"), [(True, "-e "), (False, "")])
def test_install_hint_of_a_clone_names_the_clone(installed_from: Any, tmp_path: Path, is_editable: bool, flag: str) -> None:
    clone = tmp_path / "my clone"
    clone.mkdir()
    installed_from({"url": clone.as_uri(), "dir_info": {"editable": is_editable}})
    assert install_command("torch") == f"pip install {flag}'{clone}[torch]'"


def test_install_hint_of_a_deleted_clone_does_not_name_it(installed_from: Any, tmp_path: Path) -> None:
    installed_from({"url": (tmp_path / "gone").as_uri(), "dir_info": {}})
    assert install_command("torch") == "pip install '.[torch]' in a clone of paceline"


def test_install_hint_of_a_wheel_file_names_the_wheel(installed_from: Any, tmp_path: Path) -> None:
    wheel = tmp_path / "paceline-1.0-py3-none-any.whl"
    wheel.touch()
    installed_from({"url": wheel.as_uri(), "archive_info": {}})
    assert install_command("grammar") == f"pip install '{wheel}[grammar]'"


@pytest.mark.parametrize(
    ("record", "source"),
    [
        ({"url": "https://example.org/p.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}, "git+https://example.org/p.git@abc"),
        ({"url": "https://example.org/paceline-1.0.whl", "archive_info": {}}, "https://example.org/paceline-1.0.whl"),
    ],
)
def test_install_hint_of_another_url_names_the_url(installed_from: Any, record: dict[str, Any], source: str) -> None:
    installed_from(record)
    assert install_command("grammar") == f"pip install 'paceline[grammar] @ {source}'"


@pytest.mark.parametrize("text", ["", "[]", "no json", '{"url": 5}', '{"dir_info": {}}'])
def test_install_hint_with_an_invalid_record_assumes_a_clone(installed_from: Any, tmp_path: Path, text: str) -> None:
    installed_from(None)
    (tmp_path / "paceline-1.0.dist-info" / "direct_url.json").write_text(text)
    assert install_command("grammar") == "pip install '.[grammar]' in a clone of paceline"


def test_install_hint_without_an_installation_assumes_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    assert install_command("grammar") == "pip install '.[grammar]' in a clone of paceline"


def test_install_hints_come_from_one_function_and_name_existing_extras() -> None:
    declared = set(metadata.metadata("paceline").get_all("Provides-Extra") or [])
    sources = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    named = {name for text in sources.values() for name in re.findall(r"install_command\(['\"](\w+)", text)}
    assert {"torch", "grammar"} <= named <= declared
    assert [path.name for path, text in sources.items() if "paceline[" in text] == ["installation.py"]

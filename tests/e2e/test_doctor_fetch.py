"""`paceline doctor --fetch`: what it downloads, where it reports it, and that the drafter "auto" finds it afterwards."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError
from typer.testing import CliRunner, Result

from harness.checkpoints import write_checkpoint
from paceline.cli import app
from paceline.drafters import DRAFT_MODEL, prepare_drafter
from paceline.proof import suggested_drafters
from paceline.proof.suggested_drafters import ACCEPTANCE, SuggestedDrafter, recommend_drafter

HEAD = "owner/target-small"


class Hub:
    """Replaces `snapshot_download`: directories of this machine by id, and the error that every call raises."""

    def __init__(self) -> None:
        self.models: dict[str, Path] = {}
        self.error: Exception | None = None
        self.downloaded: list[str] = []
        self.factor = 1

    def __call__(self, name: str, *, dry_run: bool = False, **options: Any) -> Any:
        if options.get("local_files_only"):
            raise LocalEntryNotFoundError("no")
        if self.error is not None:
            raise self.error
        if not dry_run:
            self.downloaded.append(name)
            return str(self.models[name])
        files = [one for one in sorted(self.models[name].iterdir()) if one.is_file()]
        return [SimpleNamespace(filename=one.name, file_size=one.stat().st_size * self.factor, will_download=True) for one in files]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fetch")
    write_checkpoint(directory / "target", "llama", num_hidden_layers=2)
    write_checkpoint(directory / "small", "llama", num_hidden_layers=1)
    return directory


@pytest.fixture
def hub(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    hub.models[HEAD] = models / "small"
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    monkeypatch.setattr(suggested_drafters, "PUBLISHED", ((HEAD, DRAFT_MODEL, "owner/target", None),))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return hub


@pytest.fixture
def fetch(models: Path) -> Callable[..., Result]:
    def run(*arguments: str) -> Result:
        return CliRunner(env={"COLUMNS": "400"}).invoke(app, ["doctor", str(models / "target"), "--fetch", *arguments])

    return run


def test_fetch_downloads_the_recommended_drafter_and_auto_finds_it(hub: Hub, models: Path, fetch: Callable[..., Result]) -> None:
    own = prepare_drafter("auto", models / "target")
    done = fetch()
    assert done.exit_code == 0
    assert f"downloading {HEAD} from the Hugging Face Hub into " in done.stderr
    assert f"{HEAD} is in {models / 'small'}; auto uses it from now on" in done.stderr
    assert hub.downloaded == [HEAD]
    found = prepare_drafter("auto", models / "target")
    assert own is not None
    assert found is not None
    assert (own.name, found.name, found.path) == ("suffix", DRAFT_MODEL, models / "small")


def test_fetch_of_a_named_drafter_reports_it_as_json(hub: Hub, models: Path, fetch: Callable[..., Result]) -> None:
    hub.models["owner/other"] = models / "small"
    facts = json.loads(fetch("--drafter", "owner/other", "--json").stdout)
    assert facts["fetched"]["drafter"] == "owner/other"
    assert facts["fetched"]["is_used"] is True
    assert facts["fetched"]["bytes"] == sum(one.stat().st_size for one in (models / "small").iterdir())
    assert facts["drafters"][0]["pair"]["works"] is True


@pytest.mark.parametrize("harm", [shutil.rmtree, lambda directory: (directory / "config.json").write_text("{")], ids=["gone", "damaged"])
def test_auto_uses_its_own_drafter_if_the_fetched_files_cannot_be_used(
    harm: Callable[[Path], object], hub: Hub, models: Path, tmp_path: Path, fetch: Callable[..., Result]
) -> None:
    hub.models[HEAD] = shutil.copytree(models / "small", tmp_path / "small")
    assert fetch().exit_code == 0
    harm(tmp_path / "small")
    found = prepare_drafter("auto", models / "target")
    assert found is not None
    assert found.name == "suffix"
    assert "doctor MODEL --fetch downloads it again" in found.notice


def test_fetched_drafter_that_does_not_fit_is_not_used(hub: Hub, models: Path, tmp_path: Path, fetch: Callable[..., Result]) -> None:
    hub.models[HEAD] = tmp_path / "damaged"
    hub.models[HEAD].mkdir()
    for name in ("config.json", "model.safetensors"):
        (hub.models[HEAD] / name).write_text("{}")
    done = fetch()
    assert done.exit_code == 1
    assert "auto does not use it" in done.stderr
    found = prepare_drafter("auto", models / "target")
    assert found is not None
    assert found.name == "suffix"


RESPONSE: Any = SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (GatedRepoError("no", response=RESPONSE), "is gated: ask for access"),
        (ConnectionError("no route"), "cannot be downloaded: no route; check network"),
        (None, f"{HEAD} needs .* GB, and .* GB free: free space, or set HF_HOME"),
    ],
    ids=["gated", "network", "disk"],
)
def test_failed_fetch_is_one_error_line(hub: Hub, fetch: Callable[..., Result], error: Exception | None, says: str) -> None:
    hub.error, hub.factor = error, 10**12
    done = fetch()
    assert done.exit_code == 1
    assert re.search(says, done.stderr)
    assert hub.downloaded == []


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["ngram"], "--fetch downloads one drafter, and --drafter is ngram"),
        (["owner/a", "owner/b"], "--drafter is owner/a, owner/b: give one id"),
    ],
)
def test_fetch_of_anything_but_one_hub_id_is_refused(hub: Hub, fetch: Callable[..., Result], names: list[str], says: str) -> None:
    done = fetch(*(word for name in names for word in ("--drafter", name)))
    assert done.exit_code == 2
    assert says in done.stderr


def test_fetch_without_a_published_drafter_names_the_ways_out(
    hub: Hub, fetch: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suggested_drafters, "PUBLISHED", ())
    done = fetch()
    assert done.exit_code == 2
    assert "no drafter that helps is known" in done.stderr
    assert "--drafter owner/name" in done.stderr


def test_recommended_drafter_has_the_highest_assumed_acceptance() -> None:
    one, other, third = (SuggestedDrafter(f"o/{name}", name, "hub", None, ACCEPTANCE[name]) for name in (DRAFT_MODEL, "eagle", "eagle3"))
    assert recommend_drafter([one, other, third]) is third
    assert recommend_drafter([one, SuggestedDrafter("mtp", "mtp", "checkpoint", None, ACCEPTANCE["mtp"])]) is None
    assert recommend_drafter([SuggestedDrafter("ngram", "ngram", "built_in", None, ACCEPTANCE["ngram"])]) is None

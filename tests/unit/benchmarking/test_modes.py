"""Which modes a model has: plain, the drafters that are available or requested, and installed peers."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from paceline.benchmarking import modes as peer_modes_module
from paceline.benchmarking.modes import find_peer, own_modes, peer_modes
from paceline.benchmarking.peers import PEERS, Peer
from paceline.benchmarking.plan import BenchPlan
from paceline.errors import BackendUnavailableError, ConfigError, IncompatibleDrafterError

PROGRAM = Peer("some.program", ("some-program==1",), frozenset({"safetensors"}), ("plain", "ngram", "draft_model"), Path("worker.py"))


def modes(target: Path, *, has_predictions: bool = False, **settings: object) -> dict[str, list[str]]:
    """Drafters by mode."""
    found = own_modes(BenchPlan(**settings), target, context=1024, has_predictions=has_predictions)  # type: ignore[arg-type]
    return {mode.name: mode.order["drafters"] for mode in found}


@pytest.fixture
def bare(mini_dir: Path, tmp_path: Path) -> Path:
    """The mini without its draft model."""
    for path in mini_dir.iterdir():
        if path.is_file():
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


def test_bench_modes_include_every_available_drafter(mini_dir: Path) -> None:
    found = {"plain": [], "ngram": ["ngram"], "suffix": ["suffix"], "draft_model": ["draft_model"], "auto": ["auto"]}
    assert modes(mini_dir) == found  # auto is suffix and the draft model
    assert modes(mini_dir, has_predictions=True) == {**found, "prediction": ["prediction"]}


def test_bench_of_a_model_without_draft_model_has_no_draft_model_mode(bare: Path) -> None:
    assert set(modes(bare)) == {"plain", "ngram", "suffix"}


def test_bench_uses_the_named_draft_model(bare: Path, mini_dir: Path) -> None:
    draft = str(mini_dir / "draft")
    assert modes(bare, draft_model=draft)["draft_model"] == [draft]
    assert modes(bare, draft_model=draft, drafters=("draft_model+ngram",)) == {"plain": [], "draft_model+ngram": [draft, "ngram"]}
    assert modes(bare, drafters=(draft,)) == {"plain": [], "draft_model draft": [draft]}


def test_bench_refuses_a_drafter_that_cannot_run(bare: Path) -> None:
    with pytest.raises(IncompatibleDrafterError, match="has no embedded draft model"):
        modes(bare, drafters=("draft_model",))
    with pytest.raises(IncompatibleDrafterError, match="neither one of auto"):
        modes(bare, drafters=("nothing-like-it",))
    with pytest.raises(IncompatibleDrafterError, match="holds no mtp head"):
        modes(bare, drafters=("mtp",))
    with pytest.raises(ConfigError, match="named twice"):
        modes(bare, drafters=("ngram", "ngram"))
    with pytest.raises(ConfigError, match="plain decoding always runs"):
        modes(bare, drafters=("none",))
    with pytest.raises(ConfigError, match="no prompt has one: add --workload copying"):
        modes(bare, drafters=("prediction",))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rounds": 0}, "rounds is 0: use a whole number from 1"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0: use a whole number from 1 to 64"),
        ({"max_tokens": 3}, "max_tokens is 3: use a whole number from 16"),
        ({"minutes": 0.0}, "minutes is 0.0"),
        ({"temperatures": (-1.0,)}, "temperature is -1.0"),
        ({"temperatures": ()}, "there is no temperature"),
        ({"quantization": "int3"}, "quantization is 'int3'"),
        ({"batch_size": 2, "peers": ("x",)}, "peers run one request at a time"),
    ],
)
def test_invalid_bench_settings_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BenchPlan(**settings)  # type: ignore[arg-type]


# --- peers ---


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Peer:
    monkeypatch.setitem(PEERS, PROGRAM.name, PROGRAM)
    return PROGRAM


def test_missing_bench_peer_is_refused_with_the_install_command(program: Peer, mini_dir: Path) -> None:
    with pytest.raises(BackendUnavailableError, match=r"some.program is not installed: paceline bench --install-peers some.program"):
        peer_modes(BenchPlan(peers=("some_program",)), mini_dir, "bf16", context=1024)


def test_unknown_bench_peer_error_lists_the_known_peers(program: Peer) -> None:
    with pytest.raises(ConfigError, match=r"peer is 'nobody': use one of .*some.program"):
        find_peer("nobody")


def test_bench_peer_has_its_own_plain_mode_and_the_draft_model(program: Peer, mini_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_modes_module, "environment_python", lambda peer: Path(sys.executable))
    found, draft = peer_modes(BenchPlan(peers=("some.program",), num_speculative_tokens=3), mini_dir, "bf16", context=1024)
    assert draft == mini_dir / "draft"
    assert [mode.name for mode in found] == ["some.program plain", "some.program ngram", "some.program draft_model"]
    assert {mode.baseline for mode in found} == {"some.program plain"}
    assert [mode.order["draft"] for mode in found] == [None, None, str(mini_dir / "draft")]
    assert json.dumps(found[0].order)
    assert {name: found[0].order[name] for name in ("mode", "num_speculative_tokens", "context", "precision")} == {
        "mode": "plain", "num_speculative_tokens": 3, "context": 1024, "precision": "bf16",
    }  # fmt: skip


def test_bench_peer_without_a_draft_model_has_no_draft_model_mode(program: Peer, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_modes_module, "environment_python", lambda peer: Path(sys.executable))
    found, draft = peer_modes(BenchPlan(peers=("some.program",)), bare, "bf16", context=1024)
    assert draft is None
    assert len(found) == 2


def test_bench_peer_that_cannot_read_the_file_format_is_refused(program: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_modes_module, "environment_python", lambda peer: Path(sys.executable))
    file = tmp_path / "model.gguf"
    shutil.copy(__file__, file)
    with pytest.raises(ConfigError, match=r"some.program reads safetensors and .*model.gguf is gguf"):
        peer_modes(BenchPlan(peers=("some.program",)), file, "bf16", context=1024)

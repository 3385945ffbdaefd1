"""`paceline recommend`: what it says of models that are here, of those that are not, and that it asks no server."""

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.checkpoints import VOCAB_SIZE, write_checkpoint
from harness.eagle_checkpoints import EAGLE1, eagle1_tensors, write_head
from harness.vocabulary_pairs import reorder_vocabulary
from paceline.cli import app
from paceline.config import quant_options
from paceline.proof.checkpoint_facts import read_checkpoint
from paceline.proof.doctor import DoctorQuestion, diagnose
from paceline.proof.recommendation import recommend as recommending
from paceline.proof.recommendation.advice import Advice, Place, Recommendation
from paceline.proof.recommendation.costs import DRAFT_LENGTHS, MachineCosts, head_bytes, model_bytes
from paceline.proof.recommendation.here import drafters_around, unreadable_places
from paceline.proof.recommendation.recommend import RecommendQuestion, recommend

PASS_S = {rows: 0.1 + 0.001 * rows for rows in (1, *(count + 1 for count in DRAFT_LENGTHS))}


@pytest.fixture(autouse=True)
def no_network(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing may ask a server; the hub's cache is an empty directory."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub._snapshot_download.HF_HUB_CACHE", str(cache), raising=False)
    return cache


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Passes of a machine with round numbers; what was asked to be measured."""
    asked: list[dict[str, Any]] = []

    def measure(target_bytes: float, **arguments: Any) -> MachineCosts:
        asked.append(arguments)
        return MachineCosts(PASS_S, bytes_per_s=target_bytes / PASS_S[1], target_bytes=target_bytes)

    monkeypatch.setattr(recommending, "measure_costs", measure)
    return asked


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and beside it two draft models, one with a vocabulary of its own, and one head."""
    folder = tmp_path_factory.mktemp("models")
    target = write_checkpoint(folder / "target", "llama", num_hidden_layers=4, hidden_size=128, intermediate_size=256, head_dim=32)
    write_checkpoint(folder / "middle", "llama", num_hidden_layers=2, hidden_size=64)
    write_checkpoint(folder / "small", "llama", num_hidden_layers=1, hidden_size=32, intermediate_size=48, head_dim=8)
    write_checkpoint(folder / "large", "llama", num_hidden_layers=3, hidden_size=128, intermediate_size=256, head_dim=32)
    shutil.copytree(target, folder / "twin")
    (folder / "no-model").mkdir()
    (folder / "no-model" / "config.json").write_text("{}", encoding="utf-8")
    return folder


def by_name(advice: Advice) -> dict[str, Recommendation]:
    return {one.drafter: one for one in advice.recommendations}


def ask(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["recommend", *map(str, arguments)])
    return done.exit_code, " ".join(done.output.split())


# Models that are here


def test_draft_models_beside_the_target_are_found_and_ranked_by_predicted_speed(models: Path, measured: list[Any]) -> None:
    advice = recommend(RecommendQuestion(model=str(models / "target")))
    found = by_name(advice)
    small, middle = found[str(models / "small")], found[str(models / "middle")]
    assert small.place is middle.place is Place.HERE
    assert "ids are passed as they are" in small.verdict
    order = [one.drafter for one in advice.recommendations]
    assert order.index(small.drafter) < order.index(middle.drafter)
    speeds = [(round(one.forecast.low.speedup, 2), one.forecast.high.speedup) for one in advice.recommendations if one.forecast]
    assert speeds == sorted(speeds, reverse=True)
    assert len(speeds) == len(advice.recommendations)
    assert small.forecast is not None
    assert small.command == f"paceline run --model {models / 'target'} --drafter {models / 'small'}"
    assert (measured[0]["model"], measured[0]["offline"]) == (str(models / "target"), True)


def test_a_draft_model_nearly_as_large_is_not_recommended_and_one_as_large_is_not_mentioned(models: Path, measured: list[Any]) -> None:
    advice = recommend(RecommendQuestion(model=str(models / "target")))
    assert {one.drafter: one.why.partition(" of the")[0] for one in advice.rejections} == {str(models / "large"): "it has 76%"}
    assert not any("twin" in one.drafter or "no-model" in one.drafter for one in (*advice.recommendations, *advice.rejections))


def test_a_random_network_with_the_right_vocabulary_is_no_pair_of_one_family(tmp_path: Path, measured: list[Any]) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    target = write_checkpoint(tmp_path / "own-8b", "llama", num_hidden_layers=4, hidden_size=128, intermediate_size=256, head_dim=32)
    for name in ("own-1b", "random"):
        write_checkpoint(tmp_path / name, "llama", **sizes)
    advice = recommend(RecommendQuestion(model=str(target)))
    found = by_name(advice)
    sibling, stranger = found[str(tmp_path / "own-1b")], found[str(tmp_path / "random")]
    assert "pairs of one family" in sibling.acceptance.source
    assert "nothing says that the two are of one family" in stranger.acceptance.source
    assert stranger.forecast is not None
    assert stranger.forecast.low.speedup == 1.0
    order = [one.drafter for one in advice.recommendations]
    assert order.index(sibling.drafter) < order.index("ngram") < order.index(stranger.drafter)


def test_what_cannot_be_read_where_the_user_looks_is_named(models: Path, tmp_path: Path, measured: list[Any]) -> None:
    folder = tmp_path / "drafters"
    (folder / "whisper").mkdir(parents=True)
    (folder / "whisper" / "config.json").write_text('{"model_type": "whisper"}', encoding="utf-8")
    (folder / "cut.gguf").write_bytes(b"GGUF")
    (folder / "nothing").mkdir()
    advice = recommend(RecommendQuestion(model=str(models / "target"), look_in=(folder,)))
    why = {Path(one.drafter).name: one.why for one in advice.rejections}
    assert "whisper" in why["whisper"]
    assert "cut.gguf" in why["cut.gguf"]
    assert "nothing" not in why


def test_a_directory_that_cannot_be_read_where_the_user_looks_is_named(
    models: Path, tmp_path: Path, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, real = tmp_path / "closed", Path.iterdir
    closed.mkdir()

    def refuse(path: Path) -> Iterator[Path]:
        if path == closed:
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    advice = recommend(RecommendQuestion(model=str(models / "target"), look_in=(tmp_path,)))
    assert (str(closed), "it cannot be read: Permission denied") in [(one.drafter, one.why) for one in advice.rejections]


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that every user can reach; files of root are closed to this process meanwhile, as they are to others."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    for name, mode in (("closed", 0o000), ("listed", 0o444)):
        (folder / "around" / name / "inner").mkdir(parents=True)
        (folder / "around" / name).chmod(mode)
    is_root = os.geteuid() == 0
    if is_root:
        ask("mini", "--no-load", "--look-in", folder / "none")  # imports what it needs: others may not read where root's Python lies
        os.seteuid(65534)
    try:
        yield folder / "around"
    finally:
        if is_root:
            os.seteuid(0)
        for name in ("closed", "listed"):
            (folder / "around" / name).chmod(0o755)
        shutil.rmtree(folder)


@pytest.mark.skipif(os.name == "nt", reason="modes are others there")
def test_what_others_closed_is_passed_over_beside_the_model_and_named_where_the_user_looks(shared: Path) -> None:
    assert drafters_around(shared / "model", (shared, shared / "closed")) == drafters_around(shared / "model", ())
    closed, why = [shared / "closed", shared / "listed"], "it cannot be read: Permission denied"
    assert unreadable_places((shared,)) == [(path, why) for path in closed]
    assert unreadable_places((shared / "closed",)) == [(shared / "closed", why)]
    assert unreadable_places((shared / "closed" / "inner",)) == [(shared / "closed" / "inner", why)]
    code, said = ask("mini", "--no-load", "--look-in", shared / "closed" / "inner")
    assert (code, "there is no such directory that can be read" in said) == (2, True)


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_a_drafter_is_named_by_its_own_path_where_a_link_leads_back_to_it(models: Path, tmp_path: Path, measured: list[Any]) -> None:
    shutil.copytree(models / "small", tmp_path / "small")
    (tmp_path / "a-link").symlink_to(tmp_path)
    (tmp_path / "a-loop").symlink_to(tmp_path / "a-loop")
    found = by_name(recommend(RecommendQuestion(model=str(models / "target"), look_in=(tmp_path,))))
    assert str(tmp_path / "small") in found
    assert not any("a-link" in name for name in found)


def test_a_sibling_of_another_vocabulary_is_not_recommended_and_says_why(
    mini_dir: Path, models: Path, tmp_path: Path, measured: list[Any]
) -> None:
    reorder_vocabulary(mini_dir / "draft", tmp_path / "cut", list(range(700)))
    shutil.copytree(models / "small", tmp_path / "stranger")
    advice = recommend(RecommendQuestion(model="mini", look_in=(tmp_path,)))
    why = {Path(one.drafter).name: one.why for one in advice.rejections}
    assert "cannot guess for" in why["stranger"]
    assert "at least 50% are needed" in why["stranger"]
    assert why["cut"].startswith("disjoint vocabularies")
    assert not {str(tmp_path / "cut"), str(tmp_path / "stranger")} & by_name(advice).keys()


def test_ids_that_are_mapped_lower_what_is_assumed(mini_dir: Path, tmp_path: Path, measured: list[Any]) -> None:
    reorder_vocabulary(mini_dir / "draft", tmp_path / "other", list(range(3400))[::-1])
    one = by_name(recommend(RecommendQuestion(model="mini", look_in=(tmp_path,))))
    other, own = one[str(tmp_path / "other")], one["auto"]
    assert "ids are mapped" in other.verdict
    assert other.acceptance.high < own.acceptance.high


def test_a_head_for_the_target_is_found_and_one_for_another_is_not_recommended(tmp_path: Path, measured: list[Any]) -> None:
    target = write_checkpoint(tmp_path / "target", "llama", num_hidden_layers=2, hidden_size=EAGLE1["hidden_size"], head_dim=8)
    write_head(tmp_path / "heads" / "eagle", EAGLE1, eagle1_tensors())
    other = write_checkpoint(tmp_path / "elsewhere" / "other", "llama", num_hidden_layers=2, hidden_size=128, head_dim=32)
    advice = recommend(RecommendQuestion(model=str(target)))
    head = by_name(advice)[str(tmp_path / "heads" / "eagle")]
    assert (head.method, head.place) == ("eagle", Place.HERE)
    assert head.memory_bytes is not None
    advice = recommend(RecommendQuestion(model=str(other), look_in=(tmp_path,)))
    assert [one.drafter for one in advice.rejections] == [str(tmp_path / "heads" / "eagle")]


def test_the_hubs_cache_is_looked_through(models: Path, measured: list[Any], no_network: Path) -> None:
    for name, source in (("Qwen3-0.6B", "small"), ("Qwen3-8B", "target")):
        folder = no_network / f"models--Qwen--{name}"
        shutil.copytree(models / source, folder / "snapshots" / "1234")
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("1234", encoding="ascii")
    advice = recommend(RecommendQuestion(model="Qwen/Qwen3-8B"))
    found = by_name(advice)
    assert (found["Qwen/Qwen3-0.6B"].place, found["Qwen/Qwen3-1.7B"].place) == (Place.HERE, Place.HUB)
    assert found["AngelSlim/Qwen3-8B_eagle3"].forecast is not None
    assert found["Qwen/Qwen3-0.6B"].command == "paceline run --model Qwen/Qwen3-8B --drafter Qwen/Qwen3-0.6B"


def test_a_drafter_is_downloaded_when_it_is_asked_for_and_no_other(
    models: Path, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[tuple[str, bool]] = []

    def snapshot_download(name: str, *, local_files_only: bool, **_: object) -> str:
        fetched.append((name, local_files_only))
        return str(models / "small")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    advice = recommend(RecommendQuestion(model=str(models / "target"), download="someone/small-model"))
    assert ("someone/small-model", False) in fetched
    assert {name for name, _ in fetched} == {"someone/small-model"}
    assert by_name(advice)["someone/small-model"].place is Place.HERE


def test_bytes_of_a_guess_leave_out_embeddings_and_experts_that_are_not_chosen(models: Path, tmp_path: Path) -> None:
    facts = read_checkpoint(models / "small")
    embedding = VOCAB_SIZE * 32 * 4
    assert model_bytes(facts, None) == facts.weights.nbytes - embedding
    assert model_bytes(facts, quant_options("quantization", "int8")) < 0.5 * model_bytes(facts, None)
    path = write_checkpoint(tmp_path / "experts", "qwen3_moe", num_hidden_layers=2, num_experts=8, num_experts_per_tok=2,
                            moe_intermediate_size=64, decoder_sparse_step=1, mlp_only_layers=[])  # fmt: skip
    facts = read_checkpoint(path)
    experts = sum(facts.weights.info(name).nbytes for name in facts.weights if ".experts." in name)
    assert experts > 0
    assert model_bytes(facts, None) == facts.weights.nbytes - VOCAB_SIZE * 64 * 4 - 0.75 * experts


def test_a_head_without_a_vocabulary_matrix_reads_the_targets(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target", "llama", num_hidden_layers=2, hidden_size=EAGLE1["hidden_size"], head_dim=8)
    head = write_head(tmp_path / "eagle", EAGLE1, eagle1_tensors())
    found = diagnose(DoctorQuestion(model=str(target), drafters=(str(head),)))
    assert found.target is not None
    facts = found.drafters[0].head
    assert facts is not None
    own = sum(tensor.nbytes for name, tensor in facts.weights.items() if "embed" not in name)
    assert head_bytes(facts, found.target, None) == own + found.target.weights.info("lm_head.weight").nbytes


# Models that are not


def test_a_model_that_is_not_here_is_judged_by_the_tables_alone(measured: list[Any]) -> None:
    advice = recommend(RecommendQuestion(model="Qwen/Qwen3-8B"))
    assert {"RedHatAI/Qwen3-8B-speculator.eagle3", "AngelSlim/Qwen3-8B_eagle3", "Qwen/Qwen3-0.6B", "ngram"} <= by_name(advice).keys()
    assert all(one.forecast is None for one in advice.recommendations)
    assert (measured, advice.problems, advice.target) == ([], [], None)
    assert "nothing was measured" in advice.notes[0]
    assert {"mtp"} < by_name(recommend(RecommendQuestion(model="Qwen/Qwen3.5-9B"))).keys()
    code, said = ask("Qwen/Qwen3-8B")
    assert code == 0
    assert "not on this machine" in said
    assert "paceline run --model Qwen/Qwen3-8B --drafter AngelSlim/Qwen3-8B_eagle3" in said
    assert "not predicted" in said


def test_a_model_that_cannot_be_loaded_is_the_error_of_doctor(tmp_path: Path, models: Path) -> None:
    for path in (tmp_path / "nowhere", models / "no-model"):
        [problem] = diagnose(DoctorQuestion(model=str(path))).problems
        code, said = ask(path)
        assert (code, said) == (1, f"error: {problem}")


# The command


def test_the_mini_is_measured_and_its_own_draft_model_is_among_what_is_recommended(tmp_path: Path) -> None:
    code, said = ask("mini", "--threads", "1", "--json", tmp_path / "found.json")
    assert code == 0, said
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    names = {one["drafter"]: one for one in found["recommendations"]}
    assert names.keys() == {"auto", "ngram", "suffix", "prediction"}
    assert (names["auto"]["method"], names["auto"]["place"], names["auto"]["parameters"]) == ("draft_model", "own", 1983232.0)
    assert all(one["forecast"]["high"]["speedup"] >= one["forecast"]["low"]["speedup"] >= 1.0 for one in names.values())
    assert list(found["pass_ms_by_rows"]) == ["1", "2", "3", "4", "5", "7", "9"]
    assert "paceline run --model mini --drafter auto --threads 1" in said
    assert "paceline run --model mini --drafter prediction --threads 1 --prediction-file FILE" in said
    assert "comes with the model" in said
    assert "assumed: 55% to 80% of guesses are kept" in said


def test_without_loading_nothing_is_predicted(measured: list[Any]) -> None:
    code, said = ask("mini", "--no-load")
    assert (code, measured) == (0, [])
    assert "nothing is predicted of its speed" in said
    assert "not predicted" in said


def test_a_place_to_look_in_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    code, said = ask("mini", "--no-load", "--look-in", tmp_path / "none")
    assert (code, "there is no such directory" in said) == (2, True)


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    code, said = ask("mini", "--no-load", "--json", tmp_path / "no" / "found.json")
    assert (code, "there is no directory" in said) == (2, True)
    code, said = ask("mini", "--no-load", "--json", tmp_path)
    assert (code, "cannot be written (Is a directory)" in said) == (2, True)

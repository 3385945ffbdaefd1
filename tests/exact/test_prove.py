"""`paceline prove` reports changed tokens as bugs, and distinguishes them from rounding differences."""

import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from harness.exact_targets import skip_without_kernels
from harness.planted_faults import (
    leave_kept_rows_of_a_tree_where_they_were,
    let_siblings_see_one_another,
    process_rows_without_the_path_to_them,
    report_logprobs_of_the_next_row,
)
from paceline.cli import app
from paceline.kv_cache.block_pool import BlockHash, BlockPool
from paceline.kv_cache.cache import KVCache
from paceline.kv_cache.row_plan import RowPlan
from paceline.proof.exactness import prove as prove_module
from paceline.proof.exactness.prove import ProofOptions, Prover
from paceline.runtimes.base import ForwardOutput
from paceline.runtimes.decoder import LOGITS
from paceline.runtimes.native.network import NativeNetwork
from paceline.sampling.draw import draw
from paceline.sampling.processors import EditedRow
from paceline.speculation import speculator as speculator_module
from paceline.speculation import verify as verify_module
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import VerifyResult

Prove = Callable[..., tuple[int, dict[str, Any]]]
TOKENS = 1_000


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["prove", *map(str, arguments)])


@pytest.fixture
def prove(checkpoint: Callable[[str], Path], tmp_path: Path, seed: int) -> Prove:
    """Exit code and report on a tiny random target."""
    skip_without_kernels()

    def ask(*arguments: object) -> tuple[int, dict[str, Any]]:
        file = tmp_path / "report.json"
        given = ["--model", checkpoint("llama"), "--seed", seed % 1000, "--threads", 1, "--no-transformers", "-q", "--json-file", file]
        result = run(*given, *(() if "--tokens" in arguments or "--case" in arguments else ("--tokens", TOKENS)), *arguments)
        assert file.is_file(), result.output
        return result.exit_code, json.loads(file.read_text())

    return ask


def test_prove_finds_no_difference_without_a_fault(prove: Prove) -> None:
    code, report = prove("--tokens", 2 * TOKENS)
    assert (code, report["verdict"], report["findings"]) == (0, "equal", [])
    compared = report["compared"]
    assert report["is_whole"]
    assert compared["tokens"] == compared["rows"] >= 2 * TOKENS
    assert report["numerics"] == "exact"
    assert report["max_abs_difference"] == 0.0
    assert compared["preemptions"] > 3
    assert compared["by"]["drafter"]["always_wrong"]["accepted"] <= 0.02 * compared["by"]["drafter"]["always_wrong"]["drafted"]
    for dimension, levels in compared["by"].items():
        assert all(counts["tokens"] > 0 for counts in levels.values()), dimension
    for event in ("prefix hit", "near hit", "next turn"):
        assert compared["by"]["event"][event]["cached_tokens"] > 0
    assert compared["by"]["event"]["cold"]["cached_tokens"] == 0


def test_prove_quick_reports_that_time_ended_it(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_kernels()
    monkeypatch.setattr(prove_module, "QUICK_S", 0.0)
    result = run("--model", checkpoint("llama"), "--seed", 1, "--threads", 1, "--no-transformers", "--quick")
    assert result.exit_code == 0, result.output
    assert "of 10,000 planned tokens" in result.output
    assert "--quick ended after 0 s: leave it out to compare everything planned" in " ".join(result.stderr.split())


def test_prove_batch_size_option_applies_to_every_case(prove: Prove) -> None:
    code, report = prove("--batch-size", 8)
    assert (code, report["verdict"]) == (0, "equal")
    assert {level: counts["tokens"] for level, counts in report["compared"]["by"]["batch"].items()} == {"8": report["compared"]["tokens"]}


# Planted faults: each must be found, and be called a bug.


def accept_one_node_too_many(patch: pytest.MonkeyPatch) -> None:
    def verify(tree: DraftTree, logits: Any, request: Any, walked: Any = None) -> VerifyResult:
        result = verify_module.verify(tree, logits, request, walked)
        last = result.accepted_nodes[-1] if result.accepted_nodes else 0
        children = tree.children(last)
        if not children or len(result.token_ids) > 2:
            return result
        token_ids = (*result.token_ids[:-1], tree.token_ids[children[0]], result.token_ids[-1])
        return VerifyResult((*result.accepted_nodes, children[0]), token_ids)

    patch.setattr(speculator_module, "verify", verify)


def take_the_bonus_token_from_the_parents_row(patch: pytest.MonkeyPatch) -> None:
    def verify(tree: DraftTree, logits: Any, request: Any, walked: Any = None) -> VerifyResult:
        result = verify_module.verify(tree, logits, request, walked)
        if not result.accepted_nodes:
            return result
        row, path = logits[tree.parents[result.accepted_nodes[-1]]], result.token_ids[:-1]
        wrong = draw(request.processor.process(row, path), request.seed, 0, len(request.token_ids) + len(path))
        return VerifyResult(result.accepted_nodes, (*path, wrong))

    patch.setattr(speculator_module, "verify", verify)


def keep_all_but_the_last_row_of_a_path(patch: pytest.MonkeyPatch) -> None:
    real = RowPlan.committed_path

    def commit(plan: RowPlan, node: int) -> Any:
        kept = real(plan, node)
        return kept._replace(moves=kept.moves[:-1])

    patch.setattr(RowPlan, "committed_path", commit)


def go_on_behind_the_wrong_block_of_a_hit(patch: pytest.MonkeyPatch) -> None:
    """The last block of a hit is that of the link before."""
    real = KVCache._find_prefix

    def find(cache: KVCache, *arguments: Any) -> list[tuple[BlockHash, int]]:
        found = real(cache, *arguments)
        return [*found[:-1], (found[-1][0], found[-2][1])] if len(found) > 1 else found

    patch.setattr(KVCache, "_find_prefix", find)


def let_a_hit_go_one_row_too_far(patch: pytest.MonkeyPatch) -> None:
    """Blocks are known by all of their tokens but the last one."""
    real = BlockPool.block_hashes

    def links(index: BlockPool, token_ids: Sequence[int], *arguments: Any) -> Iterator[BlockHash]:
        size = index._block_size
        return real(index, [0 if at % size == size - 1 else token for at, token in enumerate(token_ids)], *arguments)

    patch.setattr(BlockPool, "block_hashes", links)


def key_noise_by_node(patch: pytest.MonkeyPatch) -> None:
    """Every node of a step has the noise of its root."""
    real_verify, real_draw, root = verify_module.verify, EditedRow.draw, [0]

    def verify(tree: DraftTree, logits: Any, request: Any, walked: Any = None) -> VerifyResult:
        root[0] = len(request.token_ids)
        return real_verify(tree, logits, request)

    patch.setattr(speculator_module, "verify", verify)
    patch.setattr(EditedRow, "draw", lambda self, seed, sample, _: real_draw(self, seed, sample, root[0]))


def count_a_rejected_token_as_output(patch: pytest.MonkeyPatch) -> None:
    def verify(tree: DraftTree, logits: Any, request: Any, walked: Any = None) -> VerifyResult:
        result = verify_module.verify(tree, logits, request, walked)
        if len(tree.token_ids) > 1 and not result.accepted_nodes:
            request.processor.commit(tree.token_ids[1])
        return result

    patch.setattr(speculator_module, "verify", verify)


def drop_the_row_at_a_chunks_border(patch: pytest.MonkeyPatch) -> None:
    """The first row of every chunk but the first holds another token."""
    real = RequestRows.token_ids.fget
    assert real is not None

    def token_ids(rows: RequestRows) -> Sequence[int]:
        ids = real(rows)
        is_later_chunk = rows.num_new_tokens > 1 and rows.request.cached_sequence.committed_len > 0 and rows.request.num_output_tokens == 0
        return [0, *ids[1:]] if is_later_chunk else ids

    patch.setattr(RequestRows, "token_ids", property(token_ids))


def give_the_rows_of_another_request(patch: pytest.MonkeyPatch) -> None:
    """In passes of several requests the last one gets the first row of the pass."""
    real = ForwardOutput.split_by_plan

    def split_by_plan(output: ForwardOutput, plans: Any, nodes: Any) -> Any:
        parts = list(real(output, plans, nodes))
        if len(parts) > 1 and len(parts[-1].logits) == 1:
            parts[-1] = parts[-1]._replace(first_logits_row=0, end_logits_row=1)
        return parts

    patch.setattr(ForwardOutput, "split_by_plan", split_by_plan)


def lose_a_preempted_requests_last_token(patch: pytest.MonkeyPatch) -> None:
    from paceline.engine.scheduler import BlockManager

    real = BlockManager.free_blocks

    def free(blocks: BlockManager, request: Any) -> None:
        real(blocks, request)
        if request.num_output_tokens > 1:
            request.token_ids[-1] = request.token_ids[-2]

    patch.setattr(BlockManager, "free_blocks", free)


def spell_accepted_tokens_otherwise(patch: pytest.MonkeyPatch) -> None:
    """The text alone is wrong where a draft was kept."""
    from paceline.engine.input_processor import InputProcessor
    from paceline.speculation.request import TokenOrigin

    real = InputProcessor._decode_output

    def text(input_processor: InputProcessor, request: Any, ids: list[int]) -> str:
        shown = real(input_processor, request, ids)
        return shown.upper() if TokenOrigin.ACCEPTED in request.origins else shown

    patch.setattr(InputProcessor, "_decode_output", text)


FAULTS = (
    accept_one_node_too_many,
    take_the_bonus_token_from_the_parents_row,
    leave_kept_rows_of_a_tree_where_they_were,
    keep_all_but_the_last_row_of_a_path,
    go_on_behind_the_wrong_block_of_a_hit,
    let_a_hit_go_one_row_too_far,
    key_noise_by_node,
    process_rows_without_the_path_to_them,
    count_a_rejected_token_as_output,
    drop_the_row_at_a_chunks_border,
    report_logprobs_of_the_next_row,
    let_siblings_see_one_another,
    give_the_rows_of_another_request,
    lose_a_preempted_requests_last_token,
    spell_accepted_tokens_otherwise,
)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_prove_reports_every_planted_fault(
    plant: Callable[[pytest.MonkeyPatch], None], prove: Prove, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prove_module, "MAX_BUGS", 1)
    plant(monkeypatch)
    code, report = prove("--tokens", 4 * TOKENS)
    assert (code, report["verdict"]) == (1, "bug")
    assert all(finding["status"] == "bug" for finding in report["findings"])


# Near-ties: with fast numerics rounding may decide, but only where it can.


def jittery(patch: pytest.MonkeyPatch, size: Callable[[int], float]) -> None:
    """Logits of a pass are moved by up to `size(rows)`, otherwise for every number of rows."""
    real = NativeNetwork.forward

    def forward(network: NativeNetwork, inputs: Any, batch: Any, wanted: Any) -> ForwardOutput:
        output = real(network, inputs, batch, wanted)
        if wanted.summary is not None or not len(wanted.rows):
            return output
        logits, rows = output.results[LOGITS], len(batch.positions)
        noise = np.random.default_rng(rows).uniform(-1.0, 1.0, logits.shape[1]).astype(np.float32)
        return ForwardOutput({**output.results, LOGITS: logits + np.float32(size(rows)) * noise})

    patch.setattr(NativeNetwork, "forward", forward)


def test_prove_reports_row_dependent_noise_as_near_ties(prove: Prove, monkeypatch: pytest.MonkeyPatch) -> None:
    jittery(monkeypatch, lambda rows: 2e-2)
    code, report = prove("--numerics", "fast", "--tokens", 2 * TOKENS)
    assert (code, report["verdict"], report["numerics"]) == (0, "near-ties", "fast")
    assert 0.0 < report["max_abs_difference"] < 4.1e-2
    assert report["noise_bound"] == pytest.approx(4 * report["max_abs_difference"])
    assert len(report["findings"]) >= 3
    assert report["compared"]["near_ties"] == len(report["findings"])
    assert report["compared"]["rows"] > 50, "rows of tokens that agree"
    for finding in report["findings"]:
        assert (finding["status"], finding["kind"]) == ("near-tie", "tokens")
        assert finding["token"] != finding["plain_token"]
        assert finding["rows_differ_by"] < report["noise_bound"]
        assert finding["margin"] < finding["bound"]


def test_prove_reports_noise_above_the_load_measurement_as_a_bug(prove: Prove, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a kernel that is wrong for some shapes: passes of 1 and 8 rows are right."""
    jittery(monkeypatch, lambda rows: 2e-3 if rows in (1, 8) else 2e-1)
    monkeypatch.setattr(prove_module, "MAX_BUGS", 5)
    code, report = prove("--numerics", "fast", "--tokens", 2 * TOKENS)
    assert (code, report["verdict"]) == (1, "bug")
    assert {"rows"} <= {finding["kind"] for finding in report["findings"]}, "seen where tokens agree too"
    assert all(finding["rows_differ_by"] > report["noise_bound"] for finding in report["findings"] if finding["kind"] == "rows")


@pytest.mark.parametrize(
    "plant", [accept_one_node_too_many, key_noise_by_node, process_rows_without_the_path_to_them], ids=lambda plant: plant.__name__
)
def test_prove_reports_wrong_token_choices_as_a_bug_despite_noise(
    plant: Callable[[pytest.MonkeyPatch], None], prove: Prove, monkeypatch: pytest.MonkeyPatch
) -> None:
    jittery(monkeypatch, lambda rows: 1e-3)
    plant(monkeypatch)
    monkeypatch.setattr(prove_module, "MAX_BUGS", 3)
    code, report = prove("--numerics", "fast")
    assert (code, report["verdict"]) == (1, "bug")
    assert all(finding["rows_differ_by"] is None or finding["rows_differ_by"] < report["noise_bound"] for finding in report["findings"])


def test_prove_reports_inexact_rows_of_an_exact_backend_as_a_bug(prove: Prove, monkeypatch: pytest.MonkeyPatch) -> None:
    prove("--tokens", 1)  # the answer of the test at load is remembered
    jittery(monkeypatch, lambda rows: 1e-3)
    monkeypatch.setattr(prove_module, "MAX_BUGS", 1)
    code, report = prove()
    assert code == 1
    assert report["findings"][0]["kind"] == "load"
    assert report["findings"][0]["rows_differ_by"] > 0.0


# Reports can be reproduced.


def test_prove_with_the_same_seed_gives_the_same_report(prove: Prove) -> None:
    (_, one), (_, again), (_, other) = (prove("--tokens", 400, *seed) for seed in ((), (), ("--seed", 12345)))
    compared, repeated = ({name: value for name, value in report["compared"]["by"].items() if name != "drafter"} for report in (one, again))
    tokens = [{level: counts["tokens"] for level, counts in levels.items()} for levels in compared.values()]
    assert tokens == [{level: counts["tokens"] for level, counts in levels.items()} for levels in repeated.values()]
    assert one["compared"]["tokens"] == again["compared"]["tokens"]
    assert other["compared"]["by"]["prompt"] != one["compared"]["by"]["prompt"]


def test_prove_repeats_a_reported_case_by_number_and_by_file(prove: Prove, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(prove_module, "MAX_BUGS", 1)
    with pytest.MonkeyPatch.context() as patch:
        key_noise_by_node(patch)
        _, report = prove("--tokens", 4 * TOKENS)
        finding = report["findings"][0]
        file = tmp_path / "first.json"
        file.write_text(json.dumps(report))
        case = tmp_path / "case.json"
        case.write_text(json.dumps(finding["replay"]))
        for name in (finding["case"], file, case):
            code, again = prove("--case", name)
            assert code == 1
            shown = ("case", "request", "position", "plain_token", "token", "plain_logprob", "logprob", "rows_differ_by")
            assert [again["findings"][0][name] for name in shown] == [finding[name] for name in shown]
    assert prove("--case", case)[0] == 0, "with the fault mended nothing differs"
    assert finding["repeat"][-4:] == ["--seed", str(report["seed"]), "--case", str(finding["case"])]
    assert finding["step"]["draft_token_ids"]
    request = finding["replay"]["requests"][finding["request"]]
    assert request["params"]["temperature"] > 0
    assert request["prompt_token_ids"]


# Models of other kinds.

KINDS = ("sliding", "qwen3_5", "gemma3n", "gemma4", "gpt_oss", "lfm3")


@pytest.mark.parametrize("name", KINDS)
def test_prove_finds_no_difference_for_every_kind_of_layer(
    name: str, prove: Prove, checkpoint: Callable[[str], Path], large_counts: bool
) -> None:
    if not large_counts and name != "qwen3_5":
        pytest.skip("left to make test-long")
    code, report = prove("--model", checkpoint(name), "--tokens", 30 * TOKENS if large_counts else TOKENS)
    assert (code, report["verdict"], report["findings"]) == (0, "equal", [])
    assert report["numerics"] == "exact"


@pytest.mark.long
@pytest.mark.parametrize("part", range(3))
def test_prove_finds_no_difference_in_300_000_tokens_of_mini(part: int, seed: int, tally: "Counter[str]") -> None:
    """In parts with cases and prompts of their own, so that a run that was stopped can go on."""
    skip_without_kernels()
    prover = Prover(ProofOptions(num_tokens=100_000, seed=seed + part, compares_transformers=part == 0))
    for _ in prover.run():
        pass
    proof = prover.proof
    tally["tokens compared by paceline prove"] += proof.tally.all.tokens
    tally["rows of logits compared by paceline prove"] += proof.tally.all.rows
    assert proof.numerics == "exact"
    assert proof.findings == []
    assert proof.is_whole
    assert proof.tally.all.tokens >= 100_000
    if part == 0 and importlib.util.find_spec("torch"):
        assert proof.transformers.status == "agrees"


# Invalid arguments.


WRONG_USE = [
    (("--drafter", "none"), "nothing to compare"),
    (("--tokens", "0"), "tokens is 0"),
    (("--batch-size", "0"), "batch_size is 0: use 1 to 8 requests at a time"),
    (("--batch-size", "9"), "batch_size is 9: use 1 to 8 requests at a time"),
    (("--seed", "-1"), "seed is -1"),
    (("--prompts", "missing.txt"), "there is no file"),
    (("--prompts", "."), "a directory"),
    (("--case", "missing.json"), "no such file"),
    (("--case", "1234567"), "at most 6 digits"),
    (("--json-file", "missing/report.json"), "cannot be written"),
    (("--html", "."), "cannot be written"),
    (("--max-model-len", "40"), "max_model_len is 40"),
    (("--drafter", "no-such-drafter", "--offline"), "no-such-drafter"),
]


@pytest.mark.parametrize(("arguments", "text"), WRONG_USE, ids=[" ".join(arguments) for arguments, _ in WRONG_USE])
def test_prove_usage_errors_exit_with_2(arguments: tuple[str, ...], text: str, checkpoint: Callable[[str], Path]) -> None:
    skip_without_kernels()
    result = run("--model", checkpoint("llama"), "--threads", 1, *arguments)
    assert result.exit_code == 2, result.output
    assert text in " ".join(result.output.split())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device here")
def test_prove_prints_the_verdict_before_the_error_of_a_full_disk(checkpoint: Callable[[str], Path]) -> None:
    skip_without_kernels()
    result = run("--model", checkpoint("llama"), "--threads", 1, "--no-transformers", "--tokens", 1, "-q", "--json-file", "/dev/full")
    assert result.exit_code == 2
    verdict, error = result.output.splitlines()
    assert verdict.startswith("equal: ")
    assert error.startswith("error: /dev/full cannot be written: No space left on device; make room")


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="no such folder here")
def test_prove_refuses_a_folder_that_takes_no_file_before_it_loads() -> None:
    result = run("--model", "no-such-model", "--offline", "--json-file", "/sys/kernel/report.json")
    assert (result.exit_code, "/sys/kernel/report.json cannot be written: " in result.output) == (2, True)


def test_prove_refuses_prompt_and_case_files_without_content(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    skip_without_kernels()
    contents = {
        "empty.txt": ("--prompts", "\n \n"),
        "object.jsonl": ("--prompts", '{"prompt": 3}'),
        "broken.jsonl": ("--prompts", '{"prompt": "a'),
        "ids.jsonl": ("--prompts", '{"prompt_token_ids": [1, 99999]}'),
        "broken.json": ("--case", "{"),
        "list.json": ("--case", "[]"),
        "equal.json": ("--case", '{"findings": []}'),
        "other.json": ("--case", '{"schema": "other"}'),
        "word.json": ("--case", '{"findings": "x"}'),
        "number.json": ("--case", '{"findings": [5]}'),
        "replay.json": ("--case", '{"findings": [{"replay": {"number": 1e400}}]}'),
        "case.json": ("--case", '{"requests": [{"prompt": 1}], "number": 0, "round": 0, "seed": 0, "setting": {}}'),
    }
    for name, (option, text) in contents.items():
        (tmp_path / name).write_text(text)
        result = run("--model", checkpoint("llama"), "--threads", 1, option, tmp_path / name)
        assert (name, result.exit_code) == (name, 2), result.output
        assert "unexpected" not in result.output


def test_prove_compares_the_given_prompts(prove: Prove, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    prompts = [{"prompt": "then one two three four"}, {"prompt_token_ids": [5, 6, 7]}, {"prompt": "the cat " * 40}]
    file.write_text("\n\n".join(map(json.dumps, prompts)))
    code, report = prove("--prompts", file, "--drafter", "ngram", "--tokens", 600)
    assert code == 0
    assert list(report["compared"]["by"]["prompt"]) == ["prompt 1", "prompt 2", "prompt 3"]
    assert list(report["compared"]["by"]["drafter"]) == ["ngram", "always_wrong", "random_tree", "together"]


@pytest.mark.parametrize("form", ["--quiet", "--details", "--json"])
def test_prove_prints_one_line_a_table_or_json(checkpoint: Callable[[str], Path], form: str) -> None:
    skip_without_kernels()
    limits = ("--tokens", 200, "--seed", 3, "--threads", 1, "--no-transformers", "--drafter", "ngram")
    result = run(checkpoint("llama"), *limits, "--quiet", form)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    if form == "--json":
        assert json.loads(result.stdout)["verdict"] == "equal"
        return
    assert lines[-1].startswith("equal: 2")
    assert lines[-1].endswith("seed 3")
    assert (len(lines) == 1) is (form == "--quiet")


def test_prove_report_contains_provenance_and_the_transformers_result(
    mini_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the embedded model, which has a draft model of its own."""
    skip_without_kernels()
    pytest.importorskip("torch")
    report, shown = tmp_path / "report.json", tmp_path / "report.html"
    monkeypatch.setattr("sys.argv", ["paceline", "prove", "--tokens", "200"])
    result = run("--tokens", 200, "--seed", 3, "--threads", 1, "--json-file", report, "--html", shown)
    assert result.exit_code == 0, result.output
    assert "seed 3" in result.output
    facts = json.loads(report.read_text())
    assert facts["transformers"]["status"] == "agrees"
    assert facts["transformers"]["argmax_equal"] + facts["transformers"]["near_ties"] == facts["transformers"]["positions"] > 40
    source = facts["provenance"]
    assert source["files"] == {"model.safetensors": (mini_dir / "model.safetensors").stat().st_size}
    assert source["command"] == ["paceline", "prove", "--tokens", "200"]
    assert source["numerics"] == "exact"
    assert source["drafters"] == ["draft_model", "ngram", "suffix", "prediction", "always_wrong", "random_tree"]
    assert {"date", "processor", "kernels", "kernel_library", "python", "packages", "engine"} <= set(source)
    assert "token" not in source["engine"]
    page = shown.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "Equal: speculation changed no token" in page

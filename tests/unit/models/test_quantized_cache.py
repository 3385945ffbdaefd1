"""What is quantised once is read from disk after that; no killed, concurrent or careless writer makes a wrong file pass for a right one."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.config import QuantOptions
from paceline.errors import CheckpointError, ConfigError
from paceline.models.config import WeightType
from paceline.models.storage import quantized_cache
from paceline.models.storage.quantized_cache import CACHE_FOLDER, cached_bytes, quantized_weights
from paceline.models.weights import GroupedTensor, Tensor, Weights, as_float32

INT4 = QuantOptions(bits=4)
KINDS = [INT4, QuantOptions(bits=8)]


def make_weights(seed: int = 0, *, rows: int = 300, num_layers: int = 2) -> Weights:
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (rows, 256), "final_norm.weight": (256,)}
    for layer in range(num_layers):
        shapes |= {f"layers.{layer}.q_proj.weight": (rows, 256), f"layers.{layer}.odd.weight": (rows, 40)}
    values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return Weights({name: Tensor(array, WeightType.F32, array.shape) for name, array in values.items()})


def assert_same(found: Weights, expected: Weights) -> None:
    assert list(found) == list(expected)
    for name in expected:
        assert type(found[name]) is type(expected[name])
        assert np.array_equal(as_float32(found[name]), as_float32(expected[name]))


def files_of(directory: Path) -> list[Path]:
    return sorted((directory / CACHE_FOLDER).iterdir())


def only_file(directory: Path) -> Path:
    (path,) = files_of(directory)
    return path


@pytest.fixture
def no_quantising(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def forbid() -> None:
        def fail(*_: object, **__: object) -> None:
            raise AssertionError("a matrix was quantised again")

        monkeypatch.setattr(quantized_cache, "quantize_tensor", fail)

    return forbid


@pytest.mark.parametrize("options", KINDS, ids=lambda one: f"int{one.bits}")
def test_quantised_weights_are_mapped_from_the_cache_the_second_time(
    options: QuantOptions, tmp_path: Path, no_quantising: Callable[[], None]
) -> None:
    weights = make_weights()
    expected = Weights(quantized_weights(weights, options, None))
    first = quantized_weights(weights, options, tmp_path, num_threads=2)
    no_quantising()
    second = quantized_weights(weights, options, tmp_path)
    for found in (first, second):
        assert_same(found, expected)
        tensor = found["layers.0.q_proj.weight"]
        assert isinstance(tensor, GroupedTensor)
        assert tensor.matrix.bits == options.bits
        assert not tensor.matrix.codes.flags.owndata
        assert tensor.matrix.codes.ctypes.data % 64 == 0
    assert second["layers.0.odd.weight"] is weights["layers.0.odd.weight"]
    assert second["final_norm.weight"] is weights["final_norm.weight"]


def test_weights_without_a_matrix_to_quantise_are_unchanged(tmp_path: Path) -> None:
    weights = make_weights()
    assert quantized_weights(weights, QuantOptions(overrides=(("*", None),)), tmp_path) is weights
    assert list(tmp_path.iterdir()) == []


def test_quantised_cache_has_a_file_for_each_setting_and_content(tmp_path: Path) -> None:
    weights = make_weights()
    for options in (INT4, QuantOptions(), QuantOptions(bits=4, group=32), QuantOptions(bits=4, overrides=(("layers.0.*", 8),))):
        quantized_weights(weights, options, tmp_path)
    assert len(files_of(tmp_path)) == 4
    quantized_weights(make_weights(1), INT4, tmp_path)
    assert len(files_of(tmp_path)) == 5


def test_quantised_cache_key_depends_on_every_byte_of_the_weights(tmp_path: Path) -> None:
    weights = make_weights()
    quantized_weights(weights, INT4, tmp_path)
    array = weights["layers.1.q_proj.weight"].array
    array[123, 45] += 1
    found = quantized_weights(weights, INT4, tmp_path)
    assert len(files_of(tmp_path)) == 2
    assert_same(found, quantized_weights(weights, INT4, None))


def test_changed_file_of_equal_size_and_age_gets_another_cache_key(tmp_path: Path) -> None:
    source = tmp_path / "model.bin"
    source.write_bytes(b"0" * 100)
    cache = tmp_path / "cache"
    quantized_weights(make_weights(), INT4, cache, files=[source])
    quantized_weights(make_weights(), INT4, cache, files=[source])
    assert len(files_of(cache)) == 1
    quantized_weights(make_weights(1), INT4, cache, files=[source])
    assert len(files_of(cache)) == 2
    os.utime(source, (1, 1))
    quantized_weights(make_weights(), INT4, cache, files=[source])
    assert len(files_of(cache)) == 3
    source.write_bytes(b"0" * 101)
    os.utime(source, (1, 1))
    quantized_weights(make_weights(), INT4, cache, files=[source])
    assert len(files_of(cache)) == 4


def _flip(content: bytearray, at: int) -> bytearray:
    content[at] ^= 4
    return content


def _swap_pages(content: bytearray, start: int, block: int = 1 << 16) -> bytearray:
    content[start : start + block], content[start + block : start + 2 * block] = (
        content[start + block : start + 2 * block],
        content[start : start + block],
    )
    return content


DAMAGE: dict[str, Callable[[bytearray], bytearray]] = {
    "empty": lambda content: bytearray(),
    "cut": lambda content: content[:-1],
    "half": lambda content: content[: len(content) // 2],
    "longer": lambda content: content + b"\0",
    "header length": lambda content: _flip(content, 0),
    "header text": lambda content: _flip(content, 60),
    "first code": lambda content: _flip(content, 8 + int.from_bytes(content[:8], "little")),
    "middle": lambda content: _flip(content, len(content) // 2),
    "last scale": lambda content: _flip(content, len(content) - 49),
    "checksum": lambda content: _flip(content, len(content) - 1),
    "zeros": lambda content: content[:4096] + bytes(len(content) - 4096),
    "exchanged stretches": lambda content: _swap_pages(content, 8 + int.from_bytes(content[:8], "little")),
    "exchanged pages": lambda content: _swap_pages(content, 8 + int.from_bytes(content[:8], "little"), 4096),
    "exchanged sectors": lambda content: _swap_pages(content, 8 + int.from_bytes(content[:8], "little"), 512),
    "exchanged words": lambda content: _swap_pages(content, 8 + int.from_bytes(content[:8], "little"), 8),
    "padding": lambda content: _flip(content, len(content) - 17),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_quantised_cache_file_is_detected_and_rewritten(damage: str, tmp_path: Path, no_quantising: Callable[[], None]) -> None:
    weights = make_weights(rows=1100)
    quantized_weights(weights, INT4, tmp_path)
    path = only_file(tmp_path)
    good = path.read_bytes()
    bad = bytes(DAMAGE[damage](bytearray(good)))
    assert bad != good
    path.write_bytes(bad)
    assert_same(quantized_weights(weights, INT4, tmp_path), quantized_weights(weights, INT4, None))
    assert path.read_bytes() == good
    no_quantising()
    quantized_weights(weights, INT4, tmp_path)


KILLED = """
    import os, signal, sys
    from pathlib import Path
    sys.path[:0] = [{tests!r}]
    from test_quantized_cache import INT4, make_weights
    from paceline.models.storage import quantized_cache
    quantize, calls = quantized_cache.quantize_tensor, []

    def quantize_some(*arguments, **options):
        calls.append(arguments[0])
        if len(calls) == {after}:
            os.kill(os.getpid(), signal.SIGKILL)
        return quantize(*arguments, **options)

    quantized_cache.quantize_tensor = quantize_some
    if {after} == 0:
        quantized_cache.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    quantized_cache.quantized_weights(make_weights(), INT4, Path({cache!r}))
"""


@pytest.mark.parametrize("after", [1, 3, 0], ids=["at the first matrix", "at the last matrix", "before the rename"])
def test_quantised_cache_ignores_the_partial_file_of_a_killed_writer(after: int, tmp_path: Path) -> None:
    script = textwrap.dedent(KILLED).format(tests=str(Path(__file__).parent), after=after, cache=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = only_file(tmp_path)
    assert left.name.startswith(".partial-")
    weights = make_weights()
    assert_same(quantized_weights(weights, INT4, tmp_path), quantized_weights(weights, INT4, None))
    assert left.exists()  # its writer might still be at work
    two_days_ago = time.time() - 2 * 86400
    os.utime(left, (two_days_ago, two_days_ago))
    quantized_weights(weights, QuantOptions(), tmp_path)
    assert not left.exists()
    assert len(files_of(tmp_path)) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, CheckpointError])
def test_interrupted_quantised_cache_writer_leaves_no_file(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize = quantized_cache.quantize_tensor

    def breaks_off(name: str, *arguments: object, **options: object) -> GroupedTensor:
        if name == "layers.1.q_proj.weight":
            raise error
        return quantize(name, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(quantized_cache, "quantize_tensor", breaks_off)
    with pytest.raises(error):
        quantized_weights(make_weights(), INT4, tmp_path)
    assert files_of(tmp_path) == []


def test_concurrent_quantised_cache_writers_get_equal_weights(tmp_path: Path) -> None:
    weights = make_weights(rows=1500)
    barrier = threading.Barrier(3)
    found: list[Weights] = []

    def write() -> None:
        barrier.wait()
        found.append(quantized_weights(weights, INT4, tmp_path))

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = quantized_weights(weights, INT4, None)
    assert len(found) == 3
    for one in found:
        assert_same(one, expected)
    only_file(tmp_path)


def test_unwritable_quantised_cache_gives_a_notice_and_still_loads(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    notices: list[str] = []
    weights = make_weights()
    assert_same(quantized_weights(weights, INT4, blocked, notices=notices), quantized_weights(weights, INT4, None))
    (notice,) = notices
    assert "could not be stored in" in notice
    assert "only in memory" in notice


def test_full_disk_at_cache_writing_gives_a_notice_and_still_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(quantized_cache.os, "fsync", full)
    notices: list[str] = []
    weights = make_weights()
    assert_same(quantized_weights(weights, INT4, tmp_path, notices=notices), quantized_weights(weights, INT4, None))
    assert "No space left on device" in notices[0]
    assert files_of(tmp_path) == []


def test_quantised_cache_file_is_readable_by_the_safetensors_library(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    found = quantized_weights(make_weights(), INT4, tmp_path)
    stored = safetensors.load_file(only_file(tmp_path))
    matrix = found["layers.1.q_proj.weight"].matrix
    for part in ("codes", "scales"):
        assert np.array_equal(stored[f"layers.1.q_proj.weight.{part}"], getattr(matrix, part))
    header = only_file(tmp_path).read_bytes()
    names = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    assert names["__metadata__"]["key"] == only_file(tmp_path).stem


def test_quantising_needs_memory_for_one_tensor_at_a_time(tmp_path: Path) -> None:
    weights = make_weights(rows=4096, num_layers=6)
    one = 4096 * 256 * 4
    assert weights.nbytes > 7 * one
    tracemalloc.start()
    quantized_weights(weights, INT4, tmp_path)
    written = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    quantized = quantized_weights(weights, INT4, None)
    made = list(quantized.values())
    in_memory = tracemalloc.get_traced_memory()[1]
    groups = sum(tensor.nbytes for tensor in made if isinstance(tensor, GroupedTensor))
    del made
    for name in quantized:
        quantized.free_tensor(name)
    tracemalloc.reset_peak()
    for name in quantized:  # as a runtime does that keeps them in another form
        assert quantized[name].shape == weights[name].shape
        quantized.free_tensor(name)
    one_by_one = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert written < one + 4_000_000
    assert in_memory < groups + one + 4_000_000 < weights.nbytes / 2
    assert one_by_one < one + 4_000_000


@pytest.mark.parametrize("cached", [True, False])
def test_quantised_tensor_sizes_are_known_before_quantising(tmp_path: Path, cached: bool) -> None:
    found = quantized_weights(make_weights(), INT4, tmp_path if cached else None)
    expected = [found.tensor_info(name) for name in found]
    assert expected == [Weights(found).tensor_info(name) for name in found]
    assert {facts.bits for facts in expected} == {None, 4, 8}


def test_least_recently_used_quantised_cache_files_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that have one of them open keep using it."""
    all_weights, paths, found = [make_weights(seed) for seed in range(4)], list[Path](), list[Weights]()
    for number, weights in enumerate(all_weights[:3]):
        found.append(quantized_weights(weights, INT4, tmp_path))
        paths += set(files_of(tmp_path)) - set(paths)
        os.utime(paths[-1], (1000.0 + number, 1000.0 + number))
    size = cached_bytes(tmp_path) // 3
    monkeypatch.setenv("PACELINE_CACHE_GB", str(3.5 * size / 1e9))
    quantized_weights(all_weights[0], INT4, tmp_path)  # used again: now the second was not used for longest
    quantized_weights(all_weights[3], INT4, tmp_path)
    assert (cached_bytes(tmp_path), [path.exists() for path in paths]) == (3 * size, [True, False, True])
    assert_same(found[1], quantized_weights(all_weights[1], INT4, None))


@pytest.mark.parametrize(("limit", "said"), [("0", 0), ("0.000001", 1)])
def test_quantised_weights_over_the_cache_limit_stay_in_memory(
    limit: str, said: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE_GB", limit)
    weights, notices = make_weights(), list[str]()
    assert_same(quantized_weights(weights, INT4, tmp_path, notices=notices), quantized_weights(weights, INT4, None))
    assert cached_bytes(tmp_path) == 0
    assert len(notices) == said
    assert all("more than the 1e-06 GB that PACELINE_CACHE_GB allows" in notice for notice in notices)


@pytest.mark.parametrize("given", ["-1", "many", "nan", "inf"])
def test_invalid_paceline_cache_gb_is_refused(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE_GB", given)
    with pytest.raises(ConfigError, match=f"PACELINE_CACHE_GB is '{given}': set it to a number from 0"):
        quantized_weights(make_weights(), INT4, tmp_path)


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize(
    ("names", "where"), [(["a.safetensors"], "a.safetensors: "), (["a-1.safetensors", "a-2.safetensors"], ": "), ([], "")]
)
def test_weights_that_cannot_be_quantised_are_named_with_their_file(names: list[str], where: str, is_cached: bool, tmp_path: Path) -> None:
    files = [tmp_path / name for name in names]
    for file in files:
        file.touch()
    weights = make_weights()
    as_float32(weights["layers.0.q_proj.weight"])[3, 5] = np.nan
    expected = f"{tmp_path if len(files) == 2 else ''}{where}layers.0.q_proj.weight holds weights that are NaN"
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        quantized_weights(weights, INT4, tmp_path if is_cached else None, files=files)["layers.0.q_proj.weight"]
    assert not is_cached or files_of(tmp_path) == []

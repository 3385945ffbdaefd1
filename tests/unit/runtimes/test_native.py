"""The runtime of our own kernels: what it returns, how it grows, and that it runs wherever a process runs it."""

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.model_configs import make_config
from harness.native_network import BUILT
from paceline.errors import BackendUnavailableError, CapacityError
from paceline.models.config import ModelConfig, WeightType
from paceline.models.grouped import GroupedMatrix
from paceline.models.tensor_names import tensor_shapes
from paceline.models.weights import AnyTensor, GroupedTensor, Tensor, Weights, as_float32, to_bf16
from paceline.runtimes.base import FloatArray, ForwardOutput, assemble_pass
from paceline.runtimes.decoder import decoder
from paceline.runtimes.logits_summary import SummaryOptions
from paceline.runtimes.native import execution as execution_module
from paceline.runtimes.native import library
from paceline.runtimes.native import network as network_module
from paceline.runtimes.native.network import NativeNetwork
from paceline.runtimes.native.passes import PassRecord
from paceline.runtimes.native.records import Pass

if not BUILT:
    pytest.skip("no native kernels for this machine", allow_module_level=True)

CONFIG = make_config(num_layers=2)
PATIENCE_S = 60.0


def make_weights(config: ModelConfig, seed: int) -> dict[str, AnyTensor]:
    random = np.random.default_rng(seed)
    arrays = {name: 0.2 * random.normal(size=shape).astype(np.float32) for name, shape in tensor_shapes(config).items()}
    return {name: Tensor(array + np.float32("norm" in name), WeightType.F32, array.shape) for name, array in arrays.items()}


def open_runtime(
    seed: int,
    config: ModelConfig = CONFIG,
    *,
    num_threads: int = 2,
    collect_layers: Sequence[int] = (),
    compute_type: WeightType = WeightType.F32,
    tensors: dict[str, AnyTensor] | None = None,
) -> NativeNetwork:
    weights = Weights(make_weights(config, seed) if tensors is None else tensors)
    definition = decoder(config, collect_layers)
    return NativeNetwork(definition, config, weights, num_threads=num_threads, max_model_len=256, compute_type=compute_type)


def run_prompt(runtime: NativeNetwork, token_ids: Sequence[int], wanted: Sequence[int] | None = None) -> ForwardOutput:
    """One pass over a prompt in a cache of its own."""
    cache = runtime.new_cache(2 + len(token_ids) // 32)
    plan = cache.reserve_rows(cache.new_sequence(), range(-1, len(token_ids) - 1))
    return runtime.forward(*assemble_pass([plan], [list(token_ids)], [range(len(token_ids)) if wanted is None else wanted]))


def decode(runtime: NativeNetwork, token_ids: Sequence[int]) -> FloatArray:
    """The logits of a text run row by row, as a copy."""
    cache = runtime.new_cache(2 + len(token_ids) // 32)
    sequence, rows = cache.new_sequence(), []
    for token in token_ids:
        plan = cache.reserve_rows(sequence, range(-1, 0))
        rows.append(runtime.forward(*assemble_pass([plan], [[token]], [[0]])).logits[0].copy())
        cache.keep_path(sequence, 0)
    return np.stack(rows)


@pytest.fixture
def token_ids(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, 150).tolist()


@pytest.mark.parametrize("num_rows", [1, 2, 31, 32, 33, 64, 65, 150])
def test_native_rows_are_bit_equal_in_passes_of_any_size(num_rows: int, token_ids: list[int], seed: int) -> None:
    runtime = open_runtime(seed)
    expected = decode(runtime, token_ids[:num_rows])
    assert np.array_equal(run_prompt(runtime, token_ids[:num_rows]).logits, expected)
    assert np.array_equal(decode(runtime, token_ids[:num_rows]), expected)


def test_native_buffers_interrupted_while_growing_are_rebuilt(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = np.random.default_rng(seed).integers(0, CONFIG.vocab_size, 90).tolist()
    expected = run_prompt(open_runtime(seed), prompt).logits.copy()
    for count in range(4):
        runtime, calls = open_runtime(seed), iter(range(count))

        def empty(*arguments: Any, calls: Iterator[int] = calls, real: Any = np.empty) -> Any:
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(execution_module.np, "empty", empty)
            with pytest.raises(KeyboardInterrupt):
                runtime._programs[None].execution.reserve_rows(90)
        assert np.array_equal(run_prompt(runtime, prompt).logits, expected)


class InterruptedPass(Pass):
    """Ctrl-C comes when a field has just been set."""

    def __setattr__(self, field: str, value: object) -> None:
        super().__setattr__(field, value)
        raise KeyboardInterrupt


@pytest.mark.parametrize("field", ["ranges", "range_of_row", "logits_rows", "block_tables", "masks"])
def test_interrupt_while_a_pass_record_grows_leaves_no_dangling_address(field: str) -> None:
    memory = PassRecord(None)
    memory._reserve(field, 4)
    record, before = memory.record, getattr(memory, field)
    memory.record = InterruptedPass()
    with pytest.raises(KeyboardInterrupt):
        memory._reserve(field, 10_000)
    memory.record = record
    assert len(getattr(memory, field)) == 0 < len(before)
    memory._reserve(field, 4)
    assert getattr(memory, field).ctypes.data == getattr(record, field)


def test_interrupt_while_a_ranked_program_is_built_leaves_none(token_ids: list[int], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have no cache, and the next pass would write to address 0."""
    runtime = open_runtime(seed)
    best = run_prompt(runtime, token_ids[:4]).logits.argmax(axis=1).tolist()
    plan = (cache := runtime.new_cache(2)).reserve_rows(cache.new_sequence(), range(-1, 3))
    inputs, batch, wanted = assemble_pass([plan], [token_ids[:4]], [range(4)])
    wanted = wanted._replace(summary=SummaryOptions(CONFIG.vocab_size, 2))

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(execution_module.Execution, "set_cache", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runtime.forward(inputs, batch, wanted)
    assert [row.token_ids[0] for row in runtime.forward(inputs, batch, wanted).summaries] == best


def test_collected_hidden_states_come_in_requested_order(token_ids: list[int], seed: int) -> None:
    runtime = open_runtime(seed, collect_layers=(2, 0, 1))
    output = run_prompt(runtime, token_ids[:40])
    last, first, middle = output.collected_hidden_states
    assert np.array_equal(first, runtime.embed(np.array(token_ids[:40], np.int32)))
    norm = as_float32(make_weights(CONFIG, seed)["final_norm.weight"])
    assert np.allclose(last / np.sqrt((last**2).mean(axis=1, keepdims=True) + 1e-5) * norm, output.hidden_states, atol=1e-5)
    assert not np.allclose(middle, first)
    assert not np.allclose(middle, last)
    assert np.array_equal(output.logits, run_prompt(open_runtime(seed), token_ids[:40]).logits)


def test_native_pass_computes_no_logits_if_none_are_requested(token_ids: list[int], seed: int) -> None:
    runtime = open_runtime(seed)
    expected = run_prompt(runtime, token_ids[:40]).hidden_states.copy()
    for count in (40, 1):
        output = run_prompt(runtime, token_ids[:count], wanted=[])
        assert output.logits.shape == (0, CONFIG.vocab_size)
        assert np.array_equal(output.hidden_states, expected[:count])


def test_kv_cache_that_does_not_fit_in_memory_is_a_capacity_error(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = open_runtime(seed)

    def no_memory(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(network_module.np, "zeros", no_memory)
    with pytest.raises(CapacityError, match="lower kv_cache_gb"):
        runtime.new_cache(2)


def test_native_buffers_start_at_cache_lines(token_ids: list[int], seed: int) -> None:
    """So no vector of the kernels spans two of them; the arrays are large enough to be mapped, which numpy begins 16 bytes later."""
    runtime = open_runtime(seed)
    cache = runtime.new_cache(4000)
    plan = cache.reserve_rows(cache.new_sequence(), range(-1, 39))
    runtime.forward(*assemble_pass([plan], [token_ids[:40]], [range(40)]))
    execution = runtime._programs[None].execution
    arrays = [
        *execution._kv_storage,
        *execution._buffers,
        *execution._scratch,
        execution._split_results,
        execution._packed,
        execution._packed_rows,
    ]
    assert [array.ctypes.data % 64 for array in arrays] == [0] * len(arrays)


def test_native_grouped_weights_equal_their_dequantised_values_bit_by_bit(token_ids: list[int], seed: int) -> None:
    """Codes of 8 and 4 bits against the same network with every value written out, embedding and head included."""
    random = np.random.default_rng(seed)
    grouped: dict[str, AnyTensor] = {}
    for index, (name, tensor) in enumerate(make_weights(CONFIG, seed).items()):
        if len(tensor.shape) == 1:
            grouped[name] = tensor
            continue
        outputs, columns = tensor.shape
        bits = (8, 4)[index % 2]
        codes = random.integers(0, 256, (outputs, columns * bits // 8), dtype=np.uint8)
        scales = random.uniform(0.5, 1.5, (outputs, columns // 32)).astype(np.float32) / 2**bits
        grouped[name] = GroupedTensor(GroupedMatrix(codes, scales, None, bits, 2 ** (bits - 1)))
    written_out = {name: Tensor(as_float32(tensor), WeightType.F32, tensor.shape) for name, tensor in grouped.items()}
    found, expected = (run_prompt(open_runtime(seed, tensors=tensors), token_ids).logits for tensors in (grouped, written_out))
    assert np.array_equal(found, expected)
    assert found.std() > 0.1


def test_native_weights_rounded_at_load_equal_weights_stored_so(token_ids: list[int], seed: int) -> None:
    wide = make_weights(CONFIG, seed)
    narrow = {name: Tensor(to_bf16(as_float32(tensor)), WeightType.BF16, tensor.shape) for name, tensor in wide.items()}
    found, expected = (
        run_prompt(open_runtime(seed, tensors=tensors, compute_type=WeightType.BF16), token_ids).logits for tensors in (wide, narrow)
    )
    assert np.array_equal(found, expected)


def test_native_runtimes_with_different_thread_counts_share_one_pool(token_ids: list[int], seed: int) -> None:
    """Workers that a small team leaves idle are there again for the next large one, and run each pass once."""
    expected = decode(open_runtime(seed, num_threads=1), token_ids)
    for _ in range(3):
        for num_threads in (2, 3, 2, 1, 4, 2):
            assert np.array_equal(decode(open_runtime(seed, num_threads=num_threads), token_ids[:20]), expected[:20])


def test_concurrent_native_runtimes_get_their_own_results(token_ids: list[int], seed: int) -> None:
    texts = [token_ids[:60], token_ids[60:120]]
    runtimes = [open_runtime(seed), open_runtime(seed + 1)]
    expected = [decode(runtime, text) for runtime, text in zip(runtimes, texts, strict=True)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            assert all(map(np.array_equal, pool.map(decode, runtimes, texts), expected))


def test_concurrent_passes_of_one_native_runtime_do_not_deadlock(seed: int) -> None:
    """Invalid use with undefined results. But threads that disagree on the number of rows must not hang."""
    script = f"""
import faulthandler, threading, time
from unit.runtimes.test_native import assemble_pass, open_runtime
runtime = open_runtime({seed})
cache = runtime.new_cache(8)
faulthandler.dump_traceback_later({PATIENCE_S}, exit=True)  # from here on, because Python takes minutes to start under an emulator

def run(count):
    plan = cache.reserve_rows(cache.new_sequence(), range(-1, count - 1))
    batch = assemble_pass([plan], [[5] * count], [range(count)])
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        runtime.forward(*batch)

threads = [threading.Thread(target=run, args=(count,)) for count in (1, 8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    tests = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=tests, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_forked_process_runs_native_passes(token_ids: list[int], seed: int) -> None:
    """Its parent's workers are asleep and do not exist in it; again and again, with time to fall asleep in between."""
    runtime = open_runtime(seed)
    expected = decode(runtime, token_ids[:20])
    time.sleep(0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of forks while there are threads: that is the point here
        child = os.fork()
    if child == 0:
        same = True
        for _ in range(4):
            same = same and np.array_equal(decode(runtime, token_ids[:20]), expected)
            time.sleep(0.03)
        os._exit(0 if same else 1)
    deadline, ended, status = time.monotonic() + PATIENCE_S, 0, 0
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended, "the child hangs"
    assert status == 0
    assert np.array_equal(decode(runtime, token_ids[:20]), expected)


def test_native_profile_key_contains_kernels_threads_and_dtype(seed: int) -> None:
    one, two, twin = (open_runtime(seed, num_threads=count).execution_key for count in (1, 2, 2))
    assert one != two == twin
    assert "2 threads" in two
    weights = Weights(make_weights(CONFIG, seed))
    versions = {
        NativeNetwork(
            decoder(CONFIG), CONFIG, weights, num_threads=2, max_model_len=256, compute_type=compute_type, packed=packed
        ).execution_key
        for compute_type in (WeightType.F32, WeightType.BF16)
        for packed in (None, {})
    }
    assert two in versions
    assert len(versions) == 3


@pytest.mark.parametrize(
    ("flags", "level"),
    [("x86_64_v4 x86_64_v3", "x86_64_v4"), ("x86_64_v3", "x86_64_v3"), ("armv8_dotprod", "armv8_dotprod"), ("armv8", "armv8"), ("", None)],
)
def test_native_library_is_the_best_one_for_the_processor(flags: str, level: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    held = frozenset().union(*(library._REQUIRED_FLAGS[flag] for flag in flags.split()))
    monkeypatch.setattr(library, "processor_flags", lambda: held)
    monkeypatch.setattr(library.Path, "is_file", lambda path: True)
    path = library.kernels_path()
    assert path is None if level is None else path is not None and path.name == f"kernels.{level}.so"


def test_missing_kernels_error_names_the_other_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "kernels_path", lambda: None)
    with pytest.raises(BackendUnavailableError, match="use --backend torch"):
        library.kernels.__wrapped__()


@pytest.mark.parametrize("index", [0, 1, len(library.LAYOUT) - 2, len(library.LAYOUT) - 1])
def test_kernels_of_another_build_are_refused(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another version, with a record of another size, or with one more of them."""
    changed = [*library.LAYOUT]
    changed[index] += 4
    monkeypatch.setattr(library, "LAYOUT", changed)
    with pytest.raises(BackendUnavailableError, match=r"kernels\.\S+so are of another build than this package: install paceline again$"):
        library.kernels.__wrapped__()


def test_kernel_library_without_build_id_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.ctypes, "CDLL", lambda path: object())
    with pytest.raises(BackendUnavailableError, match="install paceline again"):
        library.open_kernels(Path("kernels.so"))

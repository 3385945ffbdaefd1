"""Which runtime serves a network, for every kind of machine."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoints import write_checkpoint
from native_network import native_config
from paceline.errors import BackendUnavailableError, ConfigError
from paceline.runtimes import backend as backend_module
from paceline.runtimes import load, numerics
from paceline.runtimes.backend import choose_backend, choose_device
from paceline.runtimes.native import library

CONFIG = native_config()
CAPPED = replace(CONFIG, family="gemma2", attention_soft_cap=50.0)
BYTES, KERNELS, OPENVINO = "bytes", "kernels", "openvino"
Choose = Callable[..., tuple[str, list[str]]]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """The choice on a machine that has what is named, and the notices."""

    def chosen(
        has: set[str], *, asked: str = "auto", device: str = "cpu", capped: bool = False, **weights: object
    ) -> tuple[str, list[str]]:
        monkeypatch.setattr(backend_module, "multiplies_bytes", lambda: BYTES in has)
        monkeypatch.setattr(backend_module, "_has_openvino", lambda: OPENVINO in has)
        monkeypatch.setattr(library, "kernels_path", lambda: Path("kernels.so") if KERNELS in has else None)
        notices: list[str] = []
        kind = {"quantised": False, **weights}
        return choose_backend(asked, device, CAPPED if capped else CONFIG, notices=notices, **kind), notices  # type: ignore[arg-type]

    return chosen


@pytest.mark.parametrize(
    ("has", "quantised", "expected"),
    [(set(), False, "native"), (set(), True, "native"), ({BYTES}, False, "native"), ({BYTES}, True, "openvino")],
)
def test_openvino_is_taken_for_quantised_weights_where_the_processor_multiplies_bytes(
    choose: Choose, has: set[str], expected: str, *, quantised: bool
) -> None:
    assert choose({*has, KERNELS, OPENVINO}, quantised=quantised) == (expected, [])
    assert choose({*has, KERNELS}, quantised=quantised) == ("native", [])


@pytest.mark.parametrize("quantised", [True, False])
def test_without_kernels_openvino_serves(choose: Choose, *, quantised: bool) -> None:
    assert choose({OPENVINO}, quantised=quantised) == ("openvino", [])


def test_capped_attention_never_goes_to_openvino(choose: Choose) -> None:
    assert choose({BYTES, KERNELS, OPENVINO}, capped=True, quantised=True) == ("native", [])
    chosen, (notice,) = choose({OPENVINO}, capped=True)
    assert chosen == "torch"
    assert "gemma2 caps attention scores" in notice
    assert "torch runtime takes over" in notice


def test_with_nothing_else_torch_takes_over_and_says_so(choose: Choose) -> None:
    chosen, (notice,) = choose(set())
    assert chosen == "torch"
    assert "OpenVINO with PagedAttention is not available" in notice
    assert "no native kernels" in notice


@pytest.mark.parametrize("asked", ["native", "openvino", "torch"])
def test_what_was_asked_for_is_taken_whatever_the_machine_has(choose: Choose, asked: str) -> None:
    assert choose({KERNELS, OPENVINO}, asked=asked) == (asked, [])
    assert choose(set(), asked=asked) == (asked, [])


def test_a_cuda_device_is_torchs(choose: Choose) -> None:
    assert choose({KERNELS, OPENVINO}, device="cuda") == ("torch", [])


def test_an_unknown_backend_is_refused_by_name(choose: Choose) -> None:
    with pytest.raises(ConfigError, match="backend is 'onnx': use auto, native, openvino, torch"):
        choose({KERNELS}, asked="onnx")


@pytest.mark.parametrize("backend", ["native", "openvino"])
def test_cpu_runtimes_stay_on_the_cpu(backend: str) -> None:
    assert choose_device("auto", backend) == "cpu"
    assert choose_device("cpu", backend) == "cpu"


def test_without_a_driver_auto_is_the_cpu_and_cuda_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "_may_have_cuda", lambda: False)
    assert choose_device("auto", "auto") == "cpu"
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailableError, match="finds no CUDA device"):
        choose_device("cuda", "auto")


@pytest.mark.parametrize(("asked", "served"), [("auto", ("native", "exact")), ("openvino", ("openvino", "fast"))])
def test_where_openvino_turns_out_inexact_auto_takes_our_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, served: tuple[str, str]
) -> None:
    pytest.importorskip("openvino")
    if library.kernels_path() is None:
        pytest.skip("no native kernels for this machine")
    from paceline.runtimes.openvino.runtime import OpenVINORuntime

    real = numerics.find_padding
    monkeypatch.setattr(numerics, "find_padding", lambda one, *rest: None if isinstance(one, OpenVINORuntime) else real(one, *rest))
    monkeypatch.setattr(load, "choose_backend", lambda *_, **__: "openvino")
    loaded = load.load_runtime(write_checkpoint(tmp_path, "llama"), load.RuntimeOptions(backend=asked, device="cpu"))
    runtime = type(loaded.runtime).__module__.split(".")[2]
    assert (runtime, loaded.runtime.capabilities.numerics.value) == served
    assert any("numerics is fast" in notice for notice in loaded.notices) == (served[1] == "fast")

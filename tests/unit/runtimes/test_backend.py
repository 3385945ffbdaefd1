"""Which runtime serves a network, for every kind of machine."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.native_network import native_config
from paceline.errors import BackendUnavailableError, ConfigError
from paceline.installation import install_extra
from paceline.runtimes import backend as backend_module
from paceline.runtimes.backend import choose_backend, choose_device
from paceline.runtimes.native import library

CONFIG = native_config()
CAPPED = replace(CONFIG, family="gemma2", attention_soft_cap=50.0)
KERNELS, OPENVINO, TORCH = "kernels", "openvino", "torch"
Choose = Callable[..., tuple[str, list[str]]]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """The choice on a machine that has what is named, and the notices."""

    def chosen(has: set[str], *, asked: str = "auto", device: str = "cpu", capped: bool = False) -> tuple[str, list[str]]:
        monkeypatch.setattr(backend_module, "_has_openvino", lambda: OPENVINO in has)
        monkeypatch.setattr(backend_module, "_has_torch", lambda: TORCH in has)
        monkeypatch.setattr(library, "kernels_path", lambda: Path("kernels.so") if KERNELS in has else None)
        notices: list[str] = []
        return choose_backend(asked, device, CAPPED if capped else CONFIG, notices=notices), notices

    return chosen


def test_our_kernels_are_taken_wherever_they_were_built(choose: Choose) -> None:
    assert choose({KERNELS, OPENVINO}) == ("native", [])
    assert choose({KERNELS}) == ("native", [])


def test_without_kernels_openvino_serves(choose: Choose) -> None:
    assert choose({OPENVINO}) == ("openvino", [])


def test_capped_attention_never_goes_to_openvino(choose: Choose) -> None:
    assert choose({KERNELS, OPENVINO}, capped=True) == ("native", [])
    chosen, (notice,) = choose({OPENVINO, TORCH}, capped=True)
    assert chosen == "torch"
    assert "gemma2 caps attention scores" in notice
    assert "torch runtime takes over" in notice


def test_with_nothing_else_torch_takes_over_and_says_so(choose: Choose) -> None:
    chosen, (notice,) = choose({TORCH})
    assert chosen == "torch"
    assert "OpenVINO with PagedAttention is not available" in notice
    assert "no native kernels" in notice


@pytest.mark.parametrize("capped", [True, False])
def test_with_nothing_at_all_the_error_says_what_to_install(choose: Choose, *, capped: bool) -> None:
    with pytest.raises(BackendUnavailableError, match="no native kernels for this machine: pip install ") as error:
        choose(set(), capped=capped)
    assert install_extra("torch") in str(error.value)
    assert (install_extra("openvino") in str(error.value)) is not capped


@pytest.mark.parametrize("asked", ["native", "openvino", "torch"])
def test_what_was_asked_for_is_taken_whatever_else_the_machine_has(choose: Choose, asked: str) -> None:
    assert choose({KERNELS, OPENVINO, TORCH}, asked=asked) == (asked, [])
    assert choose({asked}, asked=asked) == (asked, [])


@pytest.mark.parametrize("asked", ["openvino", "torch"])
def test_what_is_not_installed_is_named_with_its_extra(choose: Choose, asked: str) -> None:
    with pytest.raises(
        BackendUnavailableError, match=rf"backend '{asked}' needs .*{re.escape(install_extra(asked))}, or use --backend native"
    ):
        choose({KERNELS}, asked=asked)


def test_a_cuda_device_is_torchs(choose: Choose) -> None:
    assert choose({KERNELS, OPENVINO, TORCH}, device="cuda") == ("torch", [])


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

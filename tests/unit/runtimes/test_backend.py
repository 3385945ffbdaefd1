"""Which runtime serves a network, for every kind of machine."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import BackendUnavailableError, ConfigError
from paceline.installation import install_command
from paceline.runtimes import load as load_module
from paceline.runtimes.load import choose_backend, choose_device

KERNELS, TORCH = "kernels", "torch"
Choose = Callable[..., tuple[str, list[str]]]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """The choice on a machine that has what is named, and the notices."""

    def chosen(has: set[str], *, asked: str = "auto", device: str = "cpu") -> tuple[str, list[str]]:
        monkeypatch.setattr(load_module, "_has_torch", lambda: TORCH in has)
        monkeypatch.setattr(load_module, "kernels_path", lambda: Path("kernels.so") if KERNELS in has else None)
        notices: list[str] = []
        return choose_backend(asked, device, notices=notices), notices

    return chosen


def test_auto_backend_is_native_with_kernels(choose: Choose) -> None:
    assert choose({KERNELS, TORCH}) == ("native", [])
    assert choose({KERNELS}) == ("native", [])


def test_without_kernels_torch_is_used_with_a_notice(choose: Choose) -> None:
    chosen, (notice,) = choose({TORCH})
    assert chosen == "torch"
    assert "no native kernels" in notice


def test_missing_backend_error_names_what_to_install(choose: Choose) -> None:
    with pytest.raises(BackendUnavailableError, match="no native kernels for this machine: pip install ") as error:
        choose(set())
    assert install_command("torch") in str(error.value)


@pytest.mark.parametrize("asked", ["native", "torch"])
def test_requested_backend_is_used(choose: Choose, asked: str) -> None:
    assert choose({KERNELS, TORCH}, asked=asked) == (asked, [])
    assert choose({asked}, asked=asked) == (asked, [])


def test_missing_backend_is_named_with_its_extra(choose: Choose) -> None:
    with pytest.raises(
        BackendUnavailableError, match=rf"backend 'torch' needs .*{re.escape(install_command('torch'))}, or use --backend native"
    ):
        choose({KERNELS}, asked="torch")


def test_cuda_device_uses_torch(choose: Choose) -> None:
    assert choose({KERNELS, TORCH}, device="cuda") == ("torch", [])


def test_unknown_backend_is_refused_by_name(choose: Choose) -> None:
    for name in ("onnx", "openvino"):
        with pytest.raises(ConfigError, match=f"backend is '{name}': use auto, native, torch"):
            choose({KERNELS}, asked=name)


def test_native_backend_uses_the_cpu_for_device_auto() -> None:
    assert choose_device("auto", "native") == "cpu"
    assert choose_device("cpu", "native") == "cpu"


def test_device_auto_without_a_cuda_driver_is_cpu_and_cuda_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "_may_have_cuda", lambda: False)
    assert choose_device("auto", "auto") == "cpu"
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailableError, match="finds no CUDA device"):
        choose_device("cuda", "auto")

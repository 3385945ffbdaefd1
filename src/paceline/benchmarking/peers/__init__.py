"""Other programs that can be measured beside ours: one worker each, and one line of the table here."""

from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Peer:
    """A program that generates text.

    Attributes:
        name: what users call it.
        packages: pinned requirements for pip, torch first.
        formats: of model files that it is given: safetensors, gguf, openvino.
        modes: words of plain, ngram, draft_model, mtp.
        worker: the script that its own Python runs; it imports nothing of paceline.
        alone: further requirements, installed without what they depend on.
        needs: what an installation takes beside pip.
    """

    name: str
    packages: tuple[str, ...]
    formats: frozenset[str]
    modes: tuple[str, ...]
    worker: Path
    alone: tuple[str, ...] = ()
    needs: str = ""


_SAFETENSORS = frozenset({"safetensors"})

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            name="llama.cpp",
            packages=("llama-cpp-python==0.3.36", "gguf==0.19.0"),
            formats=_SAFETENSORS | {"gguf"},
            modes=("plain", "ngram", "draft_model"),
            worker=_HERE / "llama_cpp_worker.py",
            needs="a C++ compiler: pip builds llama.cpp",
        ),
        Peer(
            name="transformers",
            packages=("torch==2.13.0+cpu", "transformers==5.23.0", "accelerate==1.15.0"),
            formats=_SAFETENSORS,
            modes=("plain", "ngram", "draft_model"),
            worker=_HERE / "transformers_worker.py",
        ),
        Peer(
            name="openvino_genai",
            packages=(
                "torch==2.13.0+cpu", "transformers==5.5.4", "openvino==2026.4.1", "openvino-genai==2026.4.1.0",
                "openvino-tokenizers==2026.4.1.0", "nncf==3.4.0", "optimum==2.3.0", "requests==2.34.2", "setuptools<81",
            ),
            formats=_SAFETENSORS | {"openvino"},
            modes=("plain", "ngram", "draft_model"),
            worker=_HERE / "openvino_genai_worker.py",
            alone=("optimum-intel==2.2.0",),  # by itself it brings a torchvision that torch's CPU build cannot load
        ),
        Peer(
            name="mistral.rs",
            packages=("mistralrs==0.9.5",),
            formats=_SAFETENSORS,
            modes=("plain",),
            worker=_HERE / "mistral_rs_worker.py",
        ),
    )
}  # fmt: skip
"""By name."""

"""Runs SGLang's own tool-call detectors, from its wheel, on outputs given as lines of JSON.

Only the detectors are imported: what they import of the rest of SGLang (a server, CUDA kernels) is replaced by empty modules.
Usage: `sglang_detectors.py FOLDER_OF_THE_UNPACKED_WHEEL < cases > results`.
"""

import contextlib
import importlib
import io
import json
import sys
import types
from pathlib import Path
from typing import Any

from pydantic import BaseModel

DETECTORS = {
    "hermes": ("hermes_detector", "HermesDetector"),
    "qwen3_coder": ("qwen3_coder_detector", "Qwen3CoderDetector"),
    "glm45": ("glm4_moe_detector", "Glm4MoeDetector"),
    "kimi_k2": ("kimik2_detector", "KimiK2Detector"),
    "llama3_json": ("llama32_detector", "Llama32Detector"),
    "minimax_m2": ("minimax_m2", "MinimaxM2Detector"),
    "gemma4": ("gemma4_detector", "Gemma4Detector"),
    "mistral": ("mistral_detector", "MistralDetector"),
    "lfm2": ("lfm2_detector", "Lfm2Detector"),
    "pythonic": ("pythonic_detector", "PythonicDetector"),
    "llama4_pythonic": ("pythonic_detector", "PythonicDetector"),
    "deepseek_v3": ("deepseekv3_detector", "DeepSeekV3Detector"),
    "deepseek_v31": ("deepseekv31_detector", "DeepSeekV31Detector"),
    "minicpm5": ("minicpm5_detector", "MiniCPM5Detector"),
    "hunyuan_a13b": ("hunyuan_detector", "HunyuanDetector"),
    "internlm": ("internlm_detector", "InternlmDetector"),
    "apertus": ("apertus2509_detector", "Apertus2509Detector"),
    "deepseek_v32": ("deepseekv32_detector", "DeepSeekV32Detector"),
    "deepseek_v4": ("deepseekv4_detector", "DeepSeekV4Detector"),
    "gigachat3": ("gigachat3_detector", "GigaChat3Detector"),
    "gigachat3_message": ("gigachat3_detector", "GigaChat3Detector"),
    "kimi_k3": ("kimik3_detector", "KimiK3Detector"),
    "minimax_m3": ("minimax_m3", "MinimaxM3Detector"),
    "muse_glimmer": ("muse_glimmer_detector", "MuseGlimmerDetector"),
    "openai": ("gpt_oss_detector", "GptOssDetector"),
    "step3": ("step3_detector", "Step3Detector"),
}
"""SGLang's detector for each of our parsers."""


class Function(BaseModel):
    """As SGLang's protocol has it, without the rest of it."""

    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool = False


class Tool(BaseModel):
    """A tool that is offered."""

    type: str = "function"
    function: Function


class EmptyModule(types.ModuleType):
    """A module that has every name, as an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class NoSetting:
    """An environment setting that is not set, whatever its name."""

    def __getattr__(self, name: str) -> "NoSetting":
        return NoSetting()

    def get(self) -> None:
        return None


def prepare(folder: Path) -> None:
    """Make the detectors importable from an unpacked wheel."""
    for name in ("sglang", "sglang.srt", "sglang.srt.function_call", "sglang.srt.parser"):
        module = types.ModuleType(name)
        module.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = module
    names = ("xgrammar", "xgrammar.structural_tag", "sglang.srt.environ", "sglang.srt.entrypoints", "sglang.srt.entrypoints.openai")
    for name in (*names, "sglang.srt.entrypoints.openai.protocol"):
        sys.modules[name] = EmptyModule(name)
    vars(sys.modules["sglang.srt.environ"])["envs"] = NoSetting()
    vars(sys.modules["sglang.srt.entrypoints.openai.protocol"]).update(Tool=Tool, Function=Function)


def detected(case: dict[str, Any]) -> dict[str, Any]:
    """What SGLang makes of an output."""
    module, name = DETECTORS[case["parser"]]
    detector = getattr(importlib.import_module(f"sglang.srt.function_call.{module}"), name)()
    tools = [Tool(function=Function(name=name, parameters=schema)) for name, schema in case["tools"].items()]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            found = detector.detect_and_parse(case["output"], tools)
        return {"calls": [[call.name, json.loads(call.parameters or "{}")] for call in found.calls]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def main() -> None:
    prepare(Path(sys.argv[1]))
    for line in sys.stdin:
        sys.stdout.write(json.dumps(detected(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

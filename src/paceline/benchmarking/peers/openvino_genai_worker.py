"""Runs OpenVINO GenAI on the CPU. Started by the environment's own Python.

Directories are converted once by optimum-intel's `optimum-cli export openvino`: bf16 as f16 weights computed in bfloat16, int8 as its
int8, int4 as symmetric groups of 128 in all layers. Asked for: the continuous-batching pipeline without prefix caching, which is the one
that speculates; a draft model with 5 tokens a step, prompt lookup with 5 tokens and n-grams of up to 3, as its samples have them.
"""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

loop = importlib.import_module("worker_loop")

DRAFT_TOKENS, LOOKUP_NGRAM = 5, 3
EXPORTS: dict[str, tuple[str, ...]] = {
    "f32": ("--weight-format", "fp32"),
    "bf16": ("--weight-format", "fp16"),
    "int8": ("--weight-format", "int8"),
    "int4": ("--weight-format", "int4", "--sym", "--group-size", "128", "--ratio", "1.0", "--group-size-fallback", "adjust"),
}
HINTS = {"bf16": "bf16", "f32": "f32"}
_MODEL = "openvino_model.xml"


def open_model(command: Any) -> Any:
    """Open the pipeline, with the arguments of `generate` that enable drafting."""
    if command["precision"] not in EXPORTS:
        raise loop.PeerError(f"{command['precision']} is none of the precisions converted to: {', '.join(EXPORTS)}")
    genai = importlib.import_module("openvino_genai")
    target = ir_of(Path(command["model"]), command["precision"])
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": command["threads"]}
    if command["precision"] in HINTS:
        properties["INFERENCE_PRECISION_HINT"] = HINTS[command["precision"]]
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = max(256, command["context"])
    arguments: dict[str, Any] = {"scheduler_config": scheduler, **properties}
    count = command["num_speculative_tokens"] or DRAFT_TOKENS
    options: dict[str, Any] = {}
    if command["mode"] == "draft_model":
        arguments["draft_model"] = genai.draft_model(str(ir_of(Path(command["draft"]), command["precision"])), "CPU", **properties)
        options = {"num_assistant_tokens": count}
    elif command["mode"] == "ngram":
        arguments["prompt_lookup"] = True
        options = {"num_assistant_tokens": count, "max_ngram_size": LOOKUP_NGRAM}
    pipeline = genai.LLMPipeline(str(target), "CPU", **arguments)
    streamer = _streamer(genai)
    note = ", ".join([target.name, *(f"{name}={value}" for name, value in options.items())])
    version = str(genai.__version__)
    return loop.Opened(
        "OpenVINO GenAI", version, note, lambda command, arrived: _generate(genai, pipeline, streamer, options, command, arrived)
    )


def ir_of(path: Path, precision: str) -> Path:
    """Return the model in OpenVINO's format: itself, or converted from a directory."""
    if (path / _MODEL).is_file():
        return path
    if not path.is_dir():
        raise loop.PeerError(f"{path} is no directory with safetensors or {_MODEL}, the two that OpenVINO GenAI is given here")

    def convert(target: Path) -> None:
        program = Path(sys.executable).with_name("optimum-cli")
        command = [str(program), "export", "openvino", "--model", str(path), "--task", "text-generation-with-past"]
        done = subprocess.run(
            [*command, *EXPORTS[precision], str(target)], stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise loop.PeerError(f"optimum-cli cannot convert {path}: {done.stderr.strip().splitlines()[-1:]}")

    found: Path = loop.converted(path, f"{precision}-openvino", convert)
    return found


def _streamer(genai: Any) -> Any:
    class Streamer(genai.StreamerBase):  # type: ignore[misc]
        """Callback for arriving tokens."""

        def __init__(self, arrived: Any) -> None:
            super().__init__()
            self._arrived = arrived

        def write(self, token: int | list[int]) -> Any:
            self._arrived(len(token) if isinstance(token, list) else 1)
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            """Do nothing: no tokens are buffered."""

    return Streamer


def _generate(genai: Any, pipeline: Any, streamer: Any, options: Any, request: Any, arrived: Any) -> Any:
    numpy, openvino = importlib.import_module("numpy"), importlib.import_module("openvino")
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.apply_chat_template = request["max_tokens"], True, False
    if request["temperature"] > 0:
        config.do_sample, config.temperature, config.top_p, config.top_k = True, request["temperature"], 1.0, 2**31 - 1
        config.rng_seed = request["seed"]
    for name, value in options.items():
        setattr(config, name, value)
    token_ids = openvino.Tensor(numpy.array([request["prompt_ids"]], dtype="int64"))
    result = pipeline.generate(token_ids, config, streamer(arrived))
    extended = getattr(result, "extended_perf_metrics", None)
    if extended is None or not hasattr(extended, "get_num_draft_tokens"):  # prompt lookup does not report it
        return loop.Generated(list(result.tokens[0]))
    return loop.Generated(list(result.tokens[0]), extended.get_num_draft_tokens(), extended.get_num_accepted_tokens())


if __name__ == "__main__":
    loop.serve(open_model)

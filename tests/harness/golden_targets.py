"""Targets whose weights are the same on every machine and with every version of torch, and what drafts for them.

The weights of written checkpoints are replaced by numbers of NumPy's PCG64 generator, seeded by the tensor's name. Weights of drafters may
differ from machine to machine: no token depends on them.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.checkpoint_files import blur_weights
from harness.checkpoints import write_checkpoint
from paceline import LLM, SamplingParams

NUM_PROMPTS, MAX_TOKENS = 20, 24
TEMPERATURES = (0.0, 0.8)
GOLDEN = Path(__file__).resolve().parents[1] / "exact" / "golden_tokens.json"
_RANGES = (
    (("A_log",), -3.0, 1.0),
    (("conv1d.weight", "conv.conv.weight"), -0.9, 0.9),
    ((".gate.weight", ".router.weight", ".router.proj.weight"), -0.9, 0.9),
    (("layer_scalar", "router.scale", "per_expert_scale"), 0.6, 1.4),
)
"""Ends of names, and the range of the weights. All others are as in `_range`."""


@dataclass(frozen=True)
class GoldenTarget:
    """A target and its drafters.

    Attributes:
        drafters: what is given as `drafter`, by name.
        texts: prompts as texts; None = random token ids.
    """

    directory: Path
    drafters: dict[str, str]
    texts: list[str] | None = None


def fill_weights(directory: Path, *, has_norm_offset: float = 0.0) -> Path:
    """Replace all weights of a checkpoint by reproducible ones.

    Args:
        has_norm_offset: what the network adds to norm weights.
    """
    from safetensors.numpy import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    filled = {name: _weights(name, array, has_norm_offset) for name, array in tensors.items()}
    save_file(filled, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _weights(name: str, array: NDArray[Any], has_norm_offset: float) -> NDArray[Any]:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    low, high = _range(name, array.ndim, has_norm_offset)
    random = np.random.Generator(np.random.PCG64(seed)).random(array.size).reshape(array.shape)
    return (low + (high - low) * random).astype(array.dtype)


def _range(name: str, num_dimensions: int, has_norm_offset: float) -> tuple[float, float]:
    for ends, low, high in _RANGES:
        if name.endswith(ends):
            return low, high
    if "norm" in name:
        offset = 0.0 if "linear_attn" in name else has_norm_offset
        return 0.5 - offset, 1.5 - offset
    return (-0.3, 0.3) if num_dimensions < 2 else (-0.26, 0.26)


def write_qwen3(folder: Path) -> GoldenTarget:
    """A dense model with a draft model of nearly the same weights, and an EAGLE-3 head of random ones."""
    from harness.eagle_checkpoints import EAGLE3, eagle3_tensors, write_head

    target = fill_weights(write_checkpoint(folder / "target", "qwen3"))
    draft = blur_weights(fill_weights(write_checkpoint(folder / "draft", "qwen3")))
    spec = {**EAGLE3, "hidden_size": 64, "head_dim": 16, "eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    head = write_head(folder / "eagle3", spec, eagle3_tensors(spec, target_hidden=64))
    return GoldenTarget(target, {"draft_model": str(draft), "eagle3": str(head)})


def write_gemma4(folder: Path) -> GoldenTarget:
    """A model of layers with and without a window, and an assistant of random weights."""
    from harness.gemma4_assistants import write_assistant, write_target

    return GoldenTarget(fill_weights(write_target(folder / "target")), {"assistant": str(write_assistant(folder / "assistant"))})


def write_qwen3_5(folder: Path) -> GoldenTarget:
    """A hybrid of recurrent and attention layers, with an MTP module."""
    from harness.hybrid_mtp import add_module, module_tensors, write_donor, write_host

    target = write_host(folder / "target", "qwen3_5")
    fill_weights(target, has_norm_offset=1.0)
    return GoldenTarget(add_module(target, module_tensors(write_donor(folder / "donor", "qwen3_5"))), {"mtp": "mtp"})


def write_glm4_moe(folder: Path) -> GoldenTarget:
    """A mixture of experts, with an MTP module."""
    from harness.mtp_checkpoints import write_glm4_moe as write

    return GoldenTarget(fill_weights(write(folder / "target")), {"mtp": "mtp"})


WRITERS: dict[str, Callable[[Path], GoldenTarget]] = {
    "qwen3": write_qwen3,
    "gemma4": write_gemma4,
    "qwen3_5": write_qwen3_5,
    "glm4_moe": write_glm4_moe,
}
DRAFTERS = {
    "mini": ("none", "ngram", "draft_model"),
    "tinystories": ("none", "ngram", "draft_model"),
    "qwen3": ("none", "ngram", "draft_model", "eagle3"),
    "gemma4": ("none", "ngram", "assistant"),
    "qwen3_5": ("none", "ngram", "mtp"),
    "glm4_moe": ("none", "ngram", "mtp"),
}
"""By the name of a target."""
_SUBJECTS = ("the cat", "a small town", "my grandmother", "the old machine", "her first day")
_BEGINNINGS = ("Once upon a time {} was", "Write about {} and", "Yesterday {}, then {}, then", "Why did {} not")


def open_golden_target(name: str, folder: Path, mini: Path, shared: Path | None) -> GoldenTarget | None:
    """Return a target by name, written to `folder` where it is no stored one; None where its files are absent."""
    texts = [beginning.replace("{}", subject) for subject in _SUBJECTS for beginning in _BEGINNINGS]
    if name == "mini":
        return GoldenTarget(mini, {"draft_model": "draft_model"}, texts)
    if name == "tinystories":
        directory = None if shared is None else shared / "data" / "models" / "TinyStories-656K"
        if directory is None or not directory.is_dir():
            return None
        return GoldenTarget(directory, {"draft_model": str(directory)}, texts)
    return WRITERS[name](folder)


def open_golden_llm(target: GoldenTarget, drafter: str, *, threads: int = 1) -> LLM:
    """Open a target with one of its drafters."""
    options = {"dtype": "f32", "backend": "native", "device": "cpu", "max_model_len": 256, "kv_cache_gb": 0.1, "max_num_seqs": NUM_PROMPTS}
    return LLM(str(target.directory), drafter=target.drafters.get(drafter, drafter), threads=threads, **options)  # type: ignore[arg-type]


def sampling(temperature: float) -> list[SamplingParams]:
    """Return the parameters of each prompt."""
    return [
        SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, ignore_eos=True, seed=500 + index) for index in range(NUM_PROMPTS)
    ]


def record_golden(target: GoldenTarget) -> dict[str, list[list[int]]]:
    """Return a target's prompts and the token ids of plain decoding."""
    with open_golden_llm(target, "none") as llm:
        texts = target.texts
        prompts = random_prompts(llm.vocab_size) if texts is None else [llm.tokenizer.encode(text) for text in texts]
        found = {"prompts": prompts}
        for temperature in TEMPERATURES:
            found[f"T={temperature}"] = [output.token_ids for output in llm.generate(prompts, sampling(temperature))]
        return found


def random_prompts(vocab_size: int) -> list[list[int]]:
    """Prompts of 1 to 47 random token ids, every third of which repeats itself."""
    random = np.random.Generator(np.random.PCG64(20))
    prompts = []
    for number in range(NUM_PROMPTS):
        length = 1 + (17 * number) % 47
        ids = [1 + int(draw * (vocab_size - 1)) for draw in random.random(length)]
        prompts.append((3 * ids[: length // 3 + 1]) if number % 3 == 0 else ids)
    return prompts


def read_golden() -> dict[str, Any]:
    """Return the stored prompts and token ids, by target."""
    found: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return found


def write_golden(golden: dict[str, Any]) -> None:
    """Store prompts and token ids, a list of ids a line."""
    lines = ["{"]
    for name, fields in golden.items():
        lines.append(f'"{name}": {{')
        for field, lists in fields.items():
            rows = ",\n".join(json.dumps(ids, separators=(",", ":")) for ids in lists)
            lines.append(f'"{field}": [\n{rows}\n]{"," if field != list(fields)[-1] else ""}')
        lines.append("}," if name != list(golden)[-1] else "}")
    GOLDEN.write_text("\n".join([*lines, "}"]) + "\n", encoding="utf-8")


def record_all(folder: Path, mini_dir: Path, shared_dir: Path) -> None:
    """Record all targets again by plain decoding; those whose files are absent keep their ids."""
    stored, found = read_golden(), {}
    for name in DRAFTERS:
        target = open_golden_target(name, folder / name, mini_dir, shared_dir)
        found[name] = stored[name] if target is None else record_golden(target)
        print(f"{name}: {'files absent' if target is None else 'equal' if found[name] == stored.get(name) else 'changed'}")  # noqa: T201
    write_golden(found)


if __name__ == "__main__":
    repository = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as directory:
        record_all(Path(directory), repository / "src" / "paceline" / "assets" / "mini" / "target", repository.parent / "shared")

"""Damaged files of Gemma 4 assistants, with an intact target."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.kind import HIDDEN, INNER, VOCAB, GgufKind, JsonKind, Kind, SafetensorsKind, random_tensors
from harness.gemma4_assistants import write_gguf_assistant

SLIDING, FULL = "sliding_attention", "full_attention"
SIZES: dict[str, Any] = {
    "model_type": "gemma4_text", "dtype": "float32", "vocab_size": VOCAB,
    "intermediate_size": INNER, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "sliding_window": 64, "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}  # fmt: skip
TARGET: dict[str, Any] = {
    **SIZES, "hidden_size": 2 * HIDDEN, "num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "dtype": "float32",
    "per_layer_config": {"1": {"head_dim": 16, "num_key_value_heads": 1}, "3": {"head_dim": 16, "num_key_value_heads": 1}},
}  # fmt: skip
ASSISTANT: dict[str, Any] = {
    "model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"], "backbone_hidden_size": 2 * HIDDEN,
    "use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 4, "dtype": "float32",
    "text_config": {
        **SIZES, "hidden_size": HIDDEN, "num_hidden_layers": 4, "layer_types": [SLIDING] * 3 + [FULL], "num_kv_shared_layers": 4,
        "per_layer_config": {"3": {"head_dim": 16}},
    },
}  # fmt: skip
RUN = 20  # the drafter drafts once in this many files


class AssistantKind(Kind):
    """An assistant whose tensors are all looked at."""

    def prepare(self) -> None:
        from safetensors.numpy import save_file

        from paceline.models.config import config_from_values

        self.target = config_from_values(TARGET, Path("config.json"))
        self.directory = self.folder / "assistant"
        self.directory.mkdir(exist_ok=True)
        (self.directory / "config.json").write_text(json.dumps(ASSISTANT))
        save_file(assistant_arrays(), self.directory / "model.safetensors")
        self.model = self.folder / "target"
        self.model.mkdir(exist_ok=True)
        (self.model / "config.json").write_text(json.dumps(TARGET))
        save_file(random_tensors(TARGET), self.model / "model.safetensors")
        self.prepare_file()

    @property
    def path(self) -> Path:
        return self.directory / self.name.partition(" ")[2]

    def prepare_file(self) -> None:
        """Keep what the file is made from."""

    def use(self, index: int) -> None:
        from paceline.drafters import open_head_files
        from paceline.drafters.gemma4_assistant.checkpoint import load_assistant

        files = open_head_files(self.path if self.path.suffix == ".gguf" else self.directory)
        if files is None or "gemma4" not in files.kind.value:  # other metadata makes it another thing
            return
        assistant = load_assistant(files, self.target)
        assert len(list(assistant.weights.values())) == len(assistant.weights)
        assert all(layer.mixer.kv_source_layer in (2, 3) for layer in assistant.config.layers.layers)
        if assistant.token_ordering is not None:
            assert np.array_equal(np.sort(assistant.token_ordering), np.arange(VOCAB))
        if index % RUN == 0:
            self.run(assistant)

    def run(self, assistant: Any) -> None:
        """It drafts after a text without errors."""
        from paceline.drafters.gemma4_assistant.network import FEATURE, AssistantNetwork, TreeLevelInput
        from paceline.runtimes.base import Numerics, assemble_pass
        from paceline.runtimes.load import RuntimeOptions, load_network

        runtime = load_network(self.model, RuntimeOptions(numerics=Numerics.FAST, num_threads=1, device="cpu")).network
        cache, token_ids = runtime.new_cache(4), [5, 6, 7, 8, 9]
        sequence = cache.new_sequence()
        output = runtime.forward(*assemble_pass([cache.reserve_rows(sequence, range(-1, 4))], [token_ids], [[4]]))
        cache.keep_path(sequence, 4)
        nodes = [TreeLevelInput((10,), output.hidden_states[-1:].copy(), sequence)]
        found = AssistantNetwork(assistant, runtime, max_model_len=64).forward(nodes, None, None)
        assert found.results[FEATURE].shape == (1, 2 * HIDDEN)


class AssistantConfigFile(AssistantKind, JsonKind):
    name, share = "assistant config.json", 40
    values = ASSISTANT


class AssistantSafetensorsFile(AssistantKind, SafetensorsKind):
    name, share = "assistant model.safetensors", 30

    def prepare_file(self) -> None:
        self.valid = self.path.read_bytes()


class AssistantGgufFile(AssistantKind, GgufKind):
    name, share = "assistant assistant.gguf", 60

    def prepare_file(self) -> None:
        self.keep_file(write_gguf_assistant(self.directory, self.path, "Q8_0"))


def assistant_arrays() -> dict[str, np.ndarray]:
    """All tensors; what a layer has for keys is not used."""
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {
        name: array.astype(np.float32)
        for name, array in random_tensors({**ASSISTANT["text_config"], "num_kv_shared_layers": 0}).items()
        if not any(part in name for part in ("k_proj", "v_proj", "k_norm"))
    }
    shapes = {"pre_projection": (HIDDEN, 4 * HIDDEN), "post_projection": (2 * HIDDEN, HIDDEN), "masked_embedding.centroids": (12, HIDDEN)}
    arrays |= {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return arrays | {"masked_embedding.token_ordering": rng.permutation(VOCAB)}

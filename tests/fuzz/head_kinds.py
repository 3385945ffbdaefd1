"""The files of drafting heads, in safetensors and in PyTorch's own form."""

import json
from abc import abstractmethod
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.damage import BYTES, Rng, damaged_json_text, pick
from fuzz.kind import HIDDEN, INNER, LLAMA, VOCAB, Kind, damaged_safetensors, write_model


class HeadKind(Kind):
    """A drafting head beside a target whose facts are known."""

    def prepare(self) -> None:
        target = self.folder / "target"
        target.mkdir(exist_ok=True)
        write_model(target)
        self.head = self.folder / "head"
        self.head.mkdir(exist_ok=True)
        self.facts: Any = None
        self.prepare_head()

    @property
    def path(self) -> Path:
        return self.head / self.name.partition(" ")[2]

    @abstractmethod
    def prepare_head(self) -> None: ...

    def use(self, index: int) -> None:
        from paceline.config import EngineConfig, SpeculationConfig
        from paceline.drafters import HeadOptions, prepare
        from paceline.proof.checkpoint_facts import read_checkpoint
        from paceline.proof.head_pairing import judge_head

        self.facts = self.facts or read_checkpoint(self.folder / "target")
        (drafter,) = prepare(self.folder / "target", EngineConfig(offline=True), SpeculationConfig(drafter=str(self.head))).drafters
        if drafter.head is not None:
            head, _ = judge_head(drafter.head, self.facts, HeadOptions())
            assert head.memory(None).weights_bytes >= 0


def eagle3_arrays(rng: Rng) -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN),
        "midlayer.hidden_norm.weight": (HIDDEN,), "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        "midlayer.self_attn.q_proj.weight": (HIDDEN, 2 * HIDDEN), "midlayer.self_attn.k_proj.weight": (16, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (16, 2 * HIDDEN), "midlayer.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "midlayer.mlp.gate_proj.weight": (INNER, HIDDEN), "midlayer.mlp.up_proj.weight": (INNER, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, INNER),
    }  # fmt: skip
    arrays: dict[str, np.ndarray] = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return arrays | {"d2t": np.zeros(VOCAB, np.int64), "t2d": np.ones(VOCAB, bool)}


def medusa_arrays(rng: Rng) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for head in range(2):
        arrays[f"{head}.0.linear.weight"] = rng.normal(size=(HIDDEN, HIDDEN)).astype(np.float32)
        arrays[f"{head}.0.linear.bias"] = rng.normal(size=HIDDEN).astype(np.float32)
        arrays[f"{head}.1.weight"] = rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    return arrays


EAGLE_CONFIG = {
    **LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": VOCAB, "dtype": "float32",
    "eagle_aux_hidden_state_layer_ids": [1, 3, 5], "norm_before_residual": False,
}  # fmt: skip


class HeadConfigFile(HeadKind):
    name, share = "head config.json", 40

    def prepare_head(self) -> None:
        from safetensors.numpy import save_file

        save_file(eagle3_arrays(np.random.default_rng(0)), self.head / "model.safetensors")

    def undamaged(self) -> bytes:
        return json.dumps(EAGLE_CONFIG).encode()

    def make(self, rng: Rng) -> bytes:
        return damaged_json_text(EAGLE_CONFIG, rng)


class HeadSafetensorsFile(HeadKind):
    name, share = "head model.safetensors", 40

    def prepare_head(self) -> None:
        from safetensors.numpy import save

        (self.head / "config.json").write_text(json.dumps(EAGLE_CONFIG))
        self.valid = [save(arrays(np.random.default_rng(0))) for arrays in (eagle3_arrays, medusa_arrays)]

    def undamaged(self) -> bytes:
        return self.valid[0]

    def make(self, rng: Rng) -> bytes:
        return damaged_safetensors(pick(rng, self.valid), rng)


class HeadTorchFile(HeadKind):
    """PyTorch's own files: archives of pickles, of tensors and of other things."""

    name, share = "head pytorch_model.bin", 24

    def prepare_head(self) -> None:
        import torch

        (self.head / "config.json").write_text(json.dumps(EAGLE_CONFIG))
        arrays = {name: torch.from_numpy(array) for name, array in eagle3_arrays(np.random.default_rng(0)).items()}
        contents = [
            arrays,
            {"state_dict": arrays},
            [1, 2],
            {"a": 1},
            {"x": torch.zeros(3).to_sparse()},
            {1: torch.zeros(2)},
            Path("/etc/passwd"),
        ]
        self.valid = []
        for content in contents:
            for zipped in (True, False):
                stream = BytesIO()
                torch.save(content, stream, _use_new_zipfile_serialization=zipped)
                self.valid.append(stream.getvalue())

    def undamaged(self) -> bytes:
        return self.valid[0]

    def make(self, rng: Rng) -> bytes:
        return bytes(pick(rng, BYTES)(self.valid[0] if rng.integers(2) else pick(rng, self.valid), rng))

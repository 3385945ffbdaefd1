"""The files of drafting heads, in safetensors and in PyTorch's own form."""

import json
from abc import abstractmethod
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from fuzz.damage import BYTES, Rng, pick
from fuzz.kind import (
    HIDDEN,
    INNER,
    LLAMA,
    VOCAB,
    GgufKind,
    JsonKind,
    Kind,
    SafetensorsKind,
    damaged_gguf,
    damaged_safetensors,
    names_in_gguf,
    random_tensors,
    write_model,
)
from harness.block_checkpoints import DFLASH2, DSPARK, block_tensors
from harness.block_gguf import write_gguf_block
from harness.eagle_checkpoints import eagle3_tensors, write_head
from harness.gguf_checkpoints import write_gguf, write_tensors
from harness.medusa_checkpoints import random_heads


class HeadKind(Kind):
    """A drafting head, with the facts of its target."""

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
        from paceline.drafters import HeadOptions, prepare_drafters
        from paceline.proof.checkpoint_facts import read_checkpoint_facts
        from paceline.proof.pairing import check_head

        self.facts = self.facts or read_checkpoint_facts(self.folder / "target")
        (drafter,) = prepare_drafters(
            self.folder / "target", EngineConfig(offline=True), SpeculationConfig(drafter=str(self.head))
        ).drafters
        if drafter.head is not None:
            head, _ = check_head(drafter.head, self.facts, HeadOptions())
            assert head.memory(None).weights_bytes >= 0


EAGLE_CONFIG = {
    **LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": VOCAB, "dtype": "float32",
    "eagle_aux_hidden_state_layer_ids": [1, 3, 5], "norm_before_residual": False,
}  # fmt: skip


def write_eagle3(directory: Path) -> Path:
    """An EAGLE-3 head with a table for each of its draft ids."""
    return write_head(directory, EAGLE_CONFIG, eagle3_tensors(EAGLE_CONFIG, target_hidden=HIDDEN, draft_ids=range(VOCAB)))


class HeadConfigFile(HeadKind, JsonKind):
    name, share = "head config.json", 40
    values = EAGLE_CONFIG

    def prepare_head(self) -> None:
        write_eagle3(self.head)


class HeadSafetensorsFile(HeadKind):
    name, share = "head model.safetensors", 40

    def prepare_head(self) -> None:
        from safetensors.numpy import save

        self.valid = (write_eagle3(self.head) / "model.safetensors").read_bytes()
        self.medusa = save(random_heads(hidden=HIDDEN, rows=VOCAB, num_heads=2))

    def make(self, rng: Rng) -> bytes:
        return damaged_safetensors(pick(rng, (self.valid, self.medusa)), rng)


SIZES = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2, "mask_token_id": VOCAB - 1, "vocab_size": VOCAB}
BLOCK_CONFIG = {**DSPARK, **SIZES, "dflash_config": {"causal": False}, "markov_head_type": "rnn", "confidence_head_with_markov": True}


def write_block(directory: Path) -> Path:
    """A DSpark drafter with matrices and a vocabulary of its own."""
    tensors = block_tensors({**DSPARK, **SIZES}, markov="rnn", confidence=True, target_hidden=HIDDEN, vocab_size=VOCAB)
    own = {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "lm_head.weight": torch.ones(VOCAB, HIDDEN)}
    return write_head(directory, BLOCK_CONFIG, tensors | own)


class BlockConfigFile(HeadKind, JsonKind):
    name, share = "head config.json", 40
    values = BLOCK_CONFIG

    def prepare_head(self) -> None:
        write_block(self.head)


class BlockSafetensorsFile(HeadKind, SafetensorsKind):
    name, share = "head model.safetensors", 40

    def prepare_head(self) -> None:
        self.valid = (write_block(self.head) / "model.safetensors").read_bytes()


DFLASH2_CONFIG = {**DFLASH2, **SIZES, "dflash_config": {**DFLASH2["dflash_config"], "mask_token_id": VOCAB - 1}}
VANILLA_CONFIG = {**DSPARK, **SIZES, "confidence_head_with_markov": True}
RUN = 20  # every so many files what was opened drafts


class BlockGgufFile(HeadKind):
    """A DFlash2 or a DSpark drafter in llama.cpp's container, with matrices in blocks."""

    name, share = "head drafter.gguf", 60

    def prepare_head(self) -> None:
        self.files = list[bytes]()
        self.names = list[tuple[list[str], list[str]]]()
        for config, parts in ((DFLASH2_CONFIG, {}), (VANILLA_CONFIG, {"markov": "vanilla", "confidence": True})):
            tensors = block_tensors(config, target_hidden=HIDDEN, vocab_size=VOCAB, **parts)
            write_gguf_block(self.path, config, tensors, "Q8_0")
            self.files.append(self.path.read_bytes())
            self.names.append(names_in_gguf(self.path))
        self.valid = self.files[0]

    def make(self, rng: Rng) -> bytes:
        number = int(rng.integers(len(self.files)))
        return damaged_gguf(self.files[number], *self.names[number], rng)

    def use(self, index: int) -> None:
        super().use(index)
        if index % RUN == 0:
            self.run()

    def run(self) -> None:
        """It drafts, whatever that is worth."""
        from paceline.drafters import open_head_files
        from paceline.drafters.block.checkpoint import open_block_checkpoint
        from paceline.drafters.block.config import read_block_config
        from paceline.drafters.block.network import BlockHead, DraftBlock, PendingContext
        from paceline.models.config import WeightType
        from paceline.models.weights import Tensor
        from paceline.runtimes.base import RowRange

        files = open_head_files(self.path)
        if files is None:
            return
        config = read_block_config(files, self.facts.config)
        block, table = open_block_checkpoint(files, config, self.facts.config), np.ones((VOCAB, HIDDEN), np.float32)
        matrix = Tensor(table, WeightType.F32, table.shape)
        head = BlockHead(block, {"lm_head.weight": matrix, **block.weights}, matrix, num_threads=1, max_model_len=64)
        head.runtime.allocate_kv(4)
        blocks, features = np.arange(4, dtype=np.int32), np.ones((3, HIDDEN * len(config.layer_boundaries)), np.float32)
        head.run_context([PendingContext(features, RowRange(0, 3, 0, blocks))])
        rows = DraftBlock(5, RowRange(0, 2, 3, blocks, np.ones((2, 2), np.bool_)))
        assert head.run_block([rows]).logits.shape[0] == 2


class HeadTorchFile(HeadKind):
    """PyTorch's own files: archives of pickles, of tensors and of other things."""

    name, share = "head pytorch_model.bin", 24

    def prepare_head(self) -> None:
        tensors = load_file(write_eagle3(self.head) / "model.safetensors")
        (self.head / "model.safetensors").unlink()
        sparse = {"x": torch.zeros(3).to_sparse()}
        contents = (tensors, {"state_dict": tensors}, [1, 2], {"a": 1}, sparse, {1: torch.zeros(2)}, Path("/etc/passwd"))
        self.files = [torch_file(content, zipped=zipped) for content in contents for zipped in (True, False)]
        self.valid = self.files[0]

    def make(self, rng: Rng) -> bytes:
        return bytes(pick(rng, BYTES)(self.valid if rng.integers(2) else pick(rng, self.files), rng))


def torch_file(content: object, *, zipped: bool = True) -> bytes:
    """What PyTorch saves."""
    stream = BytesIO()
    torch.save(content, stream, _use_new_zipfile_serialization=zipped)
    return stream.getvalue()


PARD2 = {"pard2": True, "pard_token": 3, "pard2_scale": 0.02, "pard2_target_dim": 2 * HIDDEN, "pard2_target_layers": [-1, 2]}
PARD2_CONFIG = {**LLAMA, **PARD2}


def write_pard2(head: Path) -> bytes:
    """Write a PARD-2 draft model without its projection, and return the file of the projection."""
    write_model(head)
    (head / "config.json").write_text(json.dumps(PARD2_CONFIG))
    return torch_file({"target_proj.weight": torch.ones(HIDDEN, 2 * HIDDEN)})


class Pard2ConfigFile(HeadKind, JsonKind):
    name, share = "head config.json", 24
    values = PARD2_CONFIG

    def prepare_head(self) -> None:
        (self.head / "warp_model.bin").write_bytes(write_pard2(self.head))


class Pard2ProjectionFile(HeadKind):
    """The projection of a PARD-2 draft model, a PyTorch file."""

    name, share = "head warp_model.bin", 24

    def prepare_head(self) -> None:
        sparse = torch.zeros(HIDDEN, 2 * HIDDEN).to_sparse()
        contents = ({"target_proj.weight": sparse}, {"target_proj.weight": [1.0]}, Path("/etc/passwd"))
        self.valid, self.others = write_pard2(self.head), [torch_file(content) for content in contents]

    def make(self, rng: Rng) -> bytes:
        return bytes(pick(rng, BYTES)(self.valid, rng) if rng.integers(4) else pick(rng, self.others))


GLM: dict[str, Any] = {
    "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1, "use_qk_norm": True,
    "attention_bias": False, "tie_word_embeddings": False, "dtype": "float32",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip


class GgufModuleFile(GgufKind):
    """A model with a module for multi-token prediction; the model itself is read from a file that is whole."""

    name, share = "module.gguf", 60

    def prepare(self) -> None:
        from paceline.models.checkpoint import open_weights, read_model_config

        layers = GLM["num_hidden_layers"]
        arrays = {name: array.astype(np.float32) for name, array in random_tensors({**GLM, "num_hidden_layers": layers + 1}).items()}
        rng, prefix = np.random.default_rng(1), f"model.layers.{layers}"
        arrays[f"{prefix}.eh_proj.weight"] = rng.normal(size=(HIDDEN, 2 * HIDDEN)).astype(np.float32)
        arrays |= {f"{prefix}.{name}.weight": np.ones(HIDDEN, np.float32) for name in ("enorm", "hnorm", "shared_head.norm")}
        directory = self.folder / "model"
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(GLM))
        write_tensors(directory, arrays)
        whole = write_gguf(directory, self.folder / "whole.gguf", lambda name: "Q8_0" if "blk.3" in name else "F32")
        self.keep_file(whole, prefix="blk.3")
        self.config = read_model_config(whole)
        self.weights = open_weights(whole, self.config)

    def use(self, index: int) -> None:
        from paceline.drafters import open_head_files
        from paceline.drafters.mtp import load_mtp, open_mtp_head

        files = open_head_files(self.path, inside_target=True)
        if files is not None:
            module = load_mtp(files, self.config, self.weights)
            assert len(list(module.weights.values())) == len(module.weights)
            if index % 20 == 0:
                open_mtp_head(module, num_threads=1, max_model_len=64)

"""Targets with drafters of every kind: heads that must predict them perfectly, in every form they are stored in, and heads that cannot."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from harness.block_checkpoints import write_perfect_block, write_random_block, write_random_block2
from harness.checkpoint_files import blur_weights, change_config
from harness.checkpoints import VOCAB_SIZE, write_checkpoint
from harness.eagle_checkpoints import (
    CODE,
    DRAFT_IDS,
    EAGLE1,
    EAGLE3,
    HIDDEN,
    NUM_LAYERS,
    RECALLED,
    Tensors,
    eagle1_tensors,
    eagle3_tensors,
    legible_config,
    vocabulary_tables,
    write_gguf_head,
    write_head,
    write_legible_target,
    write_listening_eagle1,
    write_reading_eagle1,
    write_reading_eagle3,
    write_recalling_peagle,
    write_recalling_target,
)
from harness.expert_checkpoints import in_stacks
from harness.gemma4_assistants import CLUSTERS, write_assistant, write_gguf_assistant, write_target
from harness.medusa_checkpoints import perfect_blocks, perfect_heads, random_heads, write_heads, write_successor_target
from harness.mtp_checkpoints import LAYOUTS as MTP_LAYOUTS
from harness.mtp_checkpoints import Arrays, add_module, random_module, write_glm4_moe
from harness.pard2_checkpoints import add_projection

SHARPNESS = 0.5  # of the successor target: at temperature 1 it leaves its cycle now and then


@dataclass(frozen=True, slots=True)
class Pair:
    """A target's directory, and what to give as `drafter`."""

    target: Path
    drafter: str | tuple[str, ...]


def listening_module(target: Path, *, is_swapped: bool = False) -> Arrays:
    """A module for the target that reads the mean: the target's own first layer, which hears all tokens through the module's cache.

    Args:
        is_swapped: it takes the feature's half for the token's.
    """
    stored = {name: values.numpy() for name, values in load_file(target / "model.safetensors").items()}
    layer = "model.layers.0."
    arrays = {f"layer.{name[len(layer) : -len('.weight')]}": array for name, array in stored.items() if name.startswith(layer)}
    fc = np.zeros((HIDDEN, 2 * HIDDEN), np.float32)
    fc[:, HIDDEN * is_swapped : HIDDEN * (1 + is_swapped)] = np.eye(HIDDEN)
    as_embedded = np.full(HIDDEN, np.sqrt(CODE / HIDDEN), np.float32)  # undoes what the norm does to a code
    return arrays | {"fc": fc, "norm_e": as_embedded, "norm_h": as_embedded, "norm": stored["model.norm.weight"]}


# Heads that must be right, one a form of storage


def eagle_as(writer: Callable[..., Path], container: str, folder: Path, *, is_swapped: bool = False) -> str:
    """An EAGLE head in one of the containers."""
    made = writer(folder / "made", swapped=is_swapped)
    return str(write_head(folder / "head", legible_config(bias=False), _tensors(made), container=container))


def eagle3_as(container: str, folder: Path, *, is_swapped: bool = False, is_misread: bool = False) -> str:
    """An EAGLE-3 head: "midlayer" and "bin" as the paper's, "speculators" and "gguf" as those tools write them.

    Args:
        is_misread: its table is that of a reader that takes offsets for ids.
    """
    made = write_reading_eagle3(folder / "made", swapped=is_swapped)
    tensors = _tensors(made)
    if is_misread:
        tensors |= vocabulary_tables([token_id - index for index, token_id in enumerate(DRAFT_IDS)], VOCAB_SIZE)
    sizes = legible_config(draft_vocab_size=len(DRAFT_IDS), norm_before_residual=True)
    boundaries = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}
    if container == "gguf":
        folder.mkdir(parents=True, exist_ok=True)
        return str(write_gguf_head(folder / "head.gguf", sizes, tensors, boundaries=[0, 2, 4]))
    if container == "speculators":
        config: dict[str, Any] = {"speculators_model_type": "eagle3", "transformer_layer_config": sizes, "norm_before_residual": True}
        renamed = {name.replace("midlayer.", "layers.0."): values for name, values in tensors.items()}
        return str(write_head(folder / "head", {**config, **boundaries, "draft_vocab_size": len(DRAFT_IDS)}, renamed))
    config = {"architectures": ["LlamaForCausalLMEagle3"], **sizes, **boundaries}
    return str(write_head(folder / "head", config, tensors, container="bin" if container == "bin" else "safetensors"))


def medusa_as(layout: str, folder: Path, target: Path, *, shift: int = 0) -> Pair:
    """Heads for the successor target in `target`, which holds them itself in the layout "whole"."""
    successor = write_successor_target(folder / "whole" if layout == "whole" else folder / "same", "qwen3", sharpness=SHARPNESS)[1]
    is_shared = layout in ("tgi", "vllm_shared")
    arrays = perfect_blocks(successor) if is_shared else perfect_heads(successor, 3, shift=shift, sharpness=SHARPNESS)
    token_map = None
    if layout == "vllm_map":  # rows in another order, named by the map
        token_map = np.random.default_rng(1).permutation(VOCAB_SIZE)
        arrays = {name: array if ".linear." in name else array[token_map] for name, array in arrays.items()}
    if layout == "vllm_shared":  # its matrix is the target's
        arrays = {name: array if ".linear." in name else arrays["0.1.weight"] for name, array in arrays.items()}
    if layout == "whole":
        return Pair(write_heads(folder / "whole", layout, arrays), "medusa")
    return Pair(target, str(write_heads(folder / "heads", layout, arrays, token_map=token_map)))


def mtp_as(layout: str, folder: Path, target: Path, *, is_swapped: bool = False) -> Pair:
    """A copy of the target that reads the mean, with a module inside."""
    directory = shutil.copytree(target, folder / "target")
    return Pair(add_module(directory, layout, listening_module(target, is_swapped=is_swapped), num_layers=NUM_LAYERS), "mtp")


class PerfectHeads:
    """Pairs of a target and heads that must be right, written on first use.

    Attributes:
        targets: without heads: "mean", "legible", "recalling" and "successor".
    """

    NAMES = (
        *("eagle listening safetensors", "eagle listening sharded", "eagle reading bin"),
        *(f"eagle3 {container}" for container in ("midlayer", "bin", "speculators", "gguf")),
        *(f"peagle {container}" for container in ("plain", "speculators")),
        *(f"medusa {layout}" for layout in ("rows", "rows_pt", "tgi", "whole", "vllm", "vllm_shared", "vllm_map")),
        *(f"mtp {layout}" for layout in MTP_LAYOUTS),
    )
    WRONG = (
        *(f"{name} swapped" for name in ("eagle listening safetensors", "eagle reading bin", "eagle3 midlayer", "eagle3 gguf")),
        *(f"mtp {layout} swapped" for layout in MTP_LAYOUTS),
        *(f"eagle3 {container} misread" for container in ("midlayer", "gguf")),
        "peagle plain shifted",
        *(f"medusa {layout} shifted" for layout in ("rows", "vllm")),
    )

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.targets = {
            "mean": write_legible_target(folder / "mean"),
            "legible": write_legible_target(folder / "legible", reads_mean=False),
            "recalling": write_recalling_target(folder / "recalling"),
            "successor": write_successor_target(folder / "successor", "qwen3", sharpness=SHARPNESS)[0],
        }
        self._made: dict[str, Pair] = {}

    def target_of(self, name: str) -> str:
        """Which of `targets` heads of this name are for."""
        method, form, *_ = name.split()
        if method in ("medusa", "peagle"):
            return "successor" if method == "medusa" else "recalling"
        return "mean" if method == "mtp" or form == "listening" else "legible"

    def pair(self, name: str) -> Pair:
        """By one of `NAMES` or `WRONG`."""
        if name not in self._made:
            self._made[name] = self._write(name, self._folder / name.replace(" ", "-"))
        return self._made[name]

    def _write(self, name: str, folder: Path) -> Pair:
        method, form, *more = name.split()
        is_swapped, target = "swapped" in more, self.targets[self.target_of(name)]
        if method == "medusa":
            return medusa_as(form, folder, target, shift=int("shifted" in more))
        if method == "mtp":
            return mtp_as(form, folder, target, is_swapped=is_swapped)
        if method == "peagle":
            offset = RECALLED - ("shifted" in more)
            return Pair(target, str(write_recalling_peagle(folder, is_speculators=form == "speculators", offset=offset)))
        if method == "eagle3":
            return Pair(target, eagle3_as(form, folder, is_swapped=is_swapped, is_misread="misread" in more))
        writer = write_listening_eagle1 if form == "listening" else write_reading_eagle1
        return Pair(target, eagle_as(writer, more[0], folder, is_swapped=is_swapped))


def _tensors(head: Path) -> Tensors:
    return load_file(head / "model.safetensors")


# One target with a drafter of every kind


def write_random_pairs(folder: Path) -> dict[str, Pair]:
    """A random target, unrelated random heads, and a draft model that is often right."""
    target = write_checkpoint(folder / "target", "qwen3", num_hidden_layers=3, seed=4)
    draft = blur_weights(write_checkpoint(folder / "draft", "qwen3", num_hidden_layers=3, seed=4))
    sizes: Mapping[str, Any] = {"hidden_size": 64, "head_dim": 16}
    spec = {**EAGLE3, **sizes, "eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    masked = {**spec, "num_hidden_layers": 2}
    mask = torch.randn(1, 1, 192, generator=torch.Generator().manual_seed(6))
    peagle = eagle3_tensors(masked, target_hidden=64, first_layer="layers.0.", seed=7) | {"mask_hidden": mask}
    heads = {
        "eagle": str(write_head(folder / "eagle", {**EAGLE1, **sizes}, eagle1_tensors({**EAGLE1, **sizes}))),
        "eagle3": str(write_head(folder / "eagle3", spec, eagle3_tensors(spec, target_hidden=64))),
        "peagle": str(write_head(folder / "peagle", {**masked, "mask_token_id": 3}, peagle)),
        "medusa": str(write_heads(folder / "medusa", "rows", random_heads(num_heads=4))),
        "dflash": str(write_random_block(folder / "dflash")),
        "dflash-sliding": str(write_random_block(folder / "dflash-sliding", layer_types=["sliding_attention"] * 2, sliding_window=24)),
        "dflash2": str(write_random_block2(folder / "dflash2")),
        "dspark": str(write_random_block(folder / "dspark", markov="rnn")),
        "draft_model": str(draft),
        "pard": str(change_config(shutil.copytree(draft, folder / "pard"), pard_token=5)),  # seldom right after mask tokens
        "pard2": str(add_projection(shutil.copytree(draft, folder / "pard2"), scale=0.02)),
    }
    pairs = {name: Pair(target, drafter) for name, drafter in {**heads, **_texts(heads["eagle3"])}.items()}
    for layout in MTP_LAYOUTS:
        directory = shutil.copytree(target, folder / layout)
        pairs[f"mtp-{layout}"] = Pair(add_module(directory, layout, random_module(), num_layers=3), "mtp")
    return pairs


def write_known_pairs(folder: Path) -> dict[str, Pair]:
    """A target that depends on the mean, heads that read it, and heads without the mean, which are right sometimes."""
    target = write_legible_target(folder / "target")
    heads = {
        "eagle": str(write_listening_eagle1(folder / "eagle")),
        "eagle-deaf": str(write_reading_eagle1(folder / "eagle-deaf")),
        "eagle3": str(write_reading_eagle3(folder / "eagle3")),
    }
    pairs = {name: Pair(target, drafter) for name, drafter in {**heads, **_texts(heads["eagle3"])}.items()}
    return pairs | {f"mtp-{layout}": mtp_as(layout, folder / f"mtp-{layout}", target) for layout in MTP_LAYOUTS}


def write_cyclic_pairs(folder: Path) -> dict[str, Pair]:
    """The successor target, which leaves its cycle now and then, and heads that draft the cycle."""
    target, successor = write_successor_target(folder / "target", "qwen3", sharpness=SHARPNESS)
    pairs = {f"medusa-{layout}": medusa_as(layout, folder / layout, target) for layout in ("rows", "tgi", "vllm_map")}
    pairs["dspark"] = Pair(target, str(write_perfect_block(folder / "dspark", successor, sharpness=SHARPNESS)))
    return pairs | {"medusa-and-suffix": Pair(target, ("suffix", str(pairs["medusa-rows"].drafter)))}


def write_expert_pairs(folder: Path) -> dict[str, Pair]:
    """A mixture of experts, whose module is one too, one by one and in stacks, and what reads the text alone."""
    bare, target = write_glm4_moe(folder / "bare", has_module=False), write_glm4_moe(folder / "target")
    stacked = in_stacks(target, folder / "stacked")
    return {"ngram": Pair(bare, "ngram"), "mtp": Pair(target, "mtp"), "mtp-stacked": Pair(stacked, "mtp")}


def write_gemma4_pairs(folder: Path) -> dict[str, Pair]:
    """A random Gemma 4 with unrelated random assistants, in a directory and in a file."""
    target = write_target(folder / "target")
    dense, clustered = write_assistant(folder / "dense"), write_assistant(folder / "clustered", **CLUSTERS)
    file = write_gguf_assistant(clustered, folder / "assistant.gguf")
    return {"assistant": Pair(target, str(dense)), "assistant-gguf": Pair(target, str(file))}


def _texts(head: str) -> dict[str, str | tuple[str, ...]]:
    """Drafters that read the text, alone and before a head."""
    return {
        "ngram": "ngram",
        "suffix": "suffix",
        "prediction": "prediction",
        "ngram-and-eagle3": ("ngram", head),
        "all": ("prediction", "suffix", "ngram", head),
    }


PAIRS: Mapping[str, Callable[[Path], dict[str, Pair]]] = {
    "random": write_random_pairs,
    "known": write_known_pairs,
    "cyclic": write_cyclic_pairs,
    "experts": write_expert_pairs,
    "gemma4": write_gemma4_pairs,
}
"""Writers of a target with its pairs, by the target's name."""

TEXTS = ("ngram", "suffix", "prediction", "ngram-and-eagle3", "all")
KINDS = {
    "random": (
        *("eagle", "eagle3", "peagle", "medusa", *(f"mtp-{layout}" for layout in MTP_LAYOUTS)),
        *("dflash", "dflash-sliding", "dflash2", "dspark", "draft_model", "pard", "pard2", *TEXTS),
    ),
    "known": ("eagle", "eagle-deaf", "eagle3", *(f"mtp-{layout}" for layout in MTP_LAYOUTS), *TEXTS),
    "cyclic": ("medusa-rows", "medusa-tgi", "medusa-vllm_map", "dspark", "medusa-and-suffix"),
    "experts": ("ngram", "mtp", "mtp-stacked"),
    "gemma4": ("assistant", "assistant-gguf"),
}
"""The names of the pairs of each."""

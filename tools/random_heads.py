"""Write heads with random weights for a target, in the shapes of published ones, for `bench.py drafts` and `bench.py turns`.

    python tools/random_heads.py DIR/dspark --target DIR/lfm2.5-1.2b.gguf --kind dspark --layers 5 --block 7
    python tools/random_heads.py DIR/dflash --target DIR/qwen3-4b.gguf --kind dflash --layers 5 --block 16
    python tools/random_heads.py DIR/eagle3 --target DIR/qwen3-4b.gguf --kind eagle3

Sizes are the target's; the Markov head of DSpark has rank 256. EAGLE-3 heads have one layer and draft the first 32,000 ids.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from reporting import REPOSITORY

sys.path[:0] = [str(REPOSITORY / "src"), str(REPOSITORY / "tests")]

from harness.block_checkpoints import block_tensors  # noqa: E402
from harness.eagle_checkpoints import eagle3_tensors, write_head  # noqa: E402
from paceline.models.checkpoint import read_model_config  # noqa: E402
from paceline.models.config import ModelConfig  # noqa: E402
from paceline.models.layers import DenseMLP  # noqa: E402

RANK, EAGLE_IDS = 256, 32_000


def write(directory: Path, target: ModelConfig, kind: str, num_layers: int, block_size: int) -> None:
    attention = target.attention
    inner = next(layer.mlp.intermediate_size for layer in target.layers if isinstance(layer.mlp, DenseMLP))
    hidden, num_ids = target.hidden_size, min(EAGLE_IDS, target.vocab_size)
    config: dict[str, Any] = {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": num_layers, "vocab_size": target.vocab_size,
        "num_attention_heads": attention.num_heads, "num_key_value_heads": attention.num_kv_heads, "head_dim": attention.head_size,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    }  # fmt: skip
    if kind == "eagle3":
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": num_ids}
        tensors = eagle3_tensors(config, target_hidden=hidden, draft_ids=range(num_ids))
    else:
        layers = [round(1 + index * (target.num_layers - 4) / (num_layers - 1)) for index in range(num_layers)]
        config |= {"block_size": block_size, "mask_token_id": target.vocab_size - 1, "target_layer_ids": layers}
        config |= {
            "architectures": ["Qwen3DSparkModel" if kind == "dspark" else "DFlashDraftModel"],
            "sample_from_anchor": kind == "dspark",
        }
        markov, confidence = ("vanilla", False) if kind == "dspark" else (None, None)
        sizes = {"target_hidden": hidden, "num_boundaries": num_layers, "rank": RANK, "vocab_size": target.vocab_size}
        tensors = block_tensors(config, markov=markov, confidence=confidence, **sizes)
    write_head(directory, config, tensors, dtype=torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--kind", choices=("dspark", "dflash", "eagle3"), required=True)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--block", type=int, default=7)
    options = parser.parse_args()
    write(options.path, read_model_config(options.target), options.kind, options.layers, options.block)


if __name__ == "__main__":
    main()

"""Grow a trained Llama to any size without changing its function, so that there is a realistic pair of target and draft model offline.

    python tools/grow.py mini TARGET --params 1e9
    python tools/grow.py mini DRAFT --draft-of TARGET --share 1/15

SOURCE is "mini" or a directory with a Llama in safetensors (no biases, plain rotary positions). With --draft-of its own draft model,
in SOURCE/draft, is grown to a share of the target's parameters. growth.py explains the method.

Before anything is written, logits over a prompt and 200 greedy tokens are compared with the source's in float64: the largest difference,
and every argmax, so that the greedy text is the same. The grown model is in memory once, in the type that is written.
"""

import argparse
import json
import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from growth import ATTENTION_NORM, MLP_NORM, Growth, Sizes, Tensor, plan_layers

_FRAMES = (  # hidden units, layers, query heads, key heads; heads of 64 and any number of neurons
    (384, 2, 6, 2), (512, 4, 8, 4), (768, 6, 12, 4), (1024, 8, 16, 8), (1536, 12, 24, 8), (2048, 16, 32, 8), (3072, 28, 48, 8),
    (4096, 32, 64, 8),
)  # fmt: skip
_LEAST_RATIO = 2.5  # neurons for a hidden unit, below which a smaller frame is taken
_INNER_STEP = 256  # what a row of K-quants is made of
MINI = Path(__file__).resolve().parents[1] / "src" / "paceline" / "assets" / "mini" / "target"
PROMPT = "I would like to book a table for two in Toronto tonight."
TEXT_TOKENS = 200
HIGHEST_DIFFERENCE = 1e-3
LAYER = "model.layers.{}.{}.weight"
_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True, slots=True)
class Source:
    """A trained Llama: its config, sizes and tensors in float32."""

    config: dict[str, Any]
    sizes: Sizes
    tensors: dict[str, Tensor]

    @classmethod
    def open(cls, directory: Path) -> "Source":
        config, sizes = read_config(directory)
        tensors = {name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()}
        return cls(config, sizes, {name: tensor.float() for name, tensor in tensors.items()})

    @property
    def table(self) -> Tensor:
        return self.tensors.get("lm_head.weight", self.tensors["model.embed_tokens.weight"])

    def layer(self, index: int) -> dict[str, Tensor]:
        """A layer's tensors by their names within it."""
        prefix = LAYER.format(index, "").removesuffix(".weight")
        return {name[len(prefix) : -len(".weight")]: tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}

    def norms(self) -> Tensor:
        return torch.cat([tensor for tensor in self.tensors.values() if tensor.dim() == 1])


def read_config(directory: Path) -> tuple[dict[str, Any], Sizes]:
    """The config and the sizes in it.

    Raises:
        SystemExit: it is no Llama that can be grown.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config["model_type"] != "llama" or config.get("attention_bias") or rope.get("rope_type", "default") != "default":
        raise SystemExit(f"{directory}: only Llamas without biases and with plain rotary positions can be grown")
    heads = config["num_attention_heads"]
    return config, Sizes(
        config["hidden_size"], config["num_hidden_layers"], heads, config.get("num_key_value_heads", heads),
        config.get("head_dim") or config["hidden_size"] // heads, config["intermediate_size"], config["vocab_size"],
    )  # fmt: skip


class Stream:
    """The residual stream of a text in float64, a layer at a time.

    Attributes:
        loudness: of each layer so far, the size of what its attention and its MLP added by that of the stream before.
    """

    def __init__(self, rows: Tensor, sizes: Sizes, config: Mapping[str, Any]) -> None:
        self.rows, self.sizes, self.eps = rows.double(), sizes, config["rms_norm_eps"]
        theta = (config.get("rope_parameters") or config).get("rope_theta", 10000.0)
        frequencies = theta ** -(torch.arange(0, sizes.head, 2).double() / sizes.head)
        angles = torch.outer(torch.arange(len(rows)).double(), frequencies).repeat(1, 2)
        self.loudness: list[tuple[float, float]] = []
        self._cos, self._sin = angles.cos(), angles.sin()

    def pass_layer(self, weights: Mapping[str, Tensor]) -> None:
        wide = {name: tensor.double() for name, tensor in weights.items()}
        normed = self._normed(wide[ATTENTION_NORM])
        query, key, value = (
            (normed @ wide[f"self_attn.{part}_proj"].T).view(len(normed), -1, self.sizes.head).transpose(0, 1) for part in ("q", "k", "v")
        )
        ratio = self.sizes.heads // self.sizes.kv_heads
        mixed = torch.nn.functional.scaled_dot_product_attention(
            self._rotated(query), self._rotated(key).repeat_interleave(ratio, 0), value.repeat_interleave(ratio, 0), is_causal=True
        )
        attended = self._add(mixed.transpose(0, 1).flatten(1) @ wide["self_attn.o_proj"].T)
        normed = self._normed(wide[MLP_NORM])
        inner = torch.nn.functional.silu(normed @ wide["mlp.gate_proj"].T) * (normed @ wide["mlp.up_proj"].T)
        self.loudness.append((attended, self._add(inner @ wide["mlp.down_proj"].T)))

    def logits(self, norm: Tensor, table: Tensor) -> Tensor:
        return self._normed(norm.double()) @ table.double().T

    def _add(self, rows: Tensor) -> float:
        share = rows.square().mean().sqrt() / self.rows.square().mean().sqrt()
        self.rows = self.rows + rows
        return float(share)

    def _normed(self, weight: Tensor) -> Tensor:
        return self.rows * (self.rows.square().mean(dim=1, keepdim=True) + self.eps).rsqrt() * weight

    def _rotated(self, rows: Tensor) -> Tensor:
        first, second = rows.chunk(2, dim=-1)
        return rows * self._cos + torch.cat([-second, first], dim=-1) * self._sin


def grow(source_directory: Path, out: Path, sizes: Sizes, *, dtype: str, seed: int, token_ids: list[int]) -> float:
    """Write the grown model to `out`, if its logits are the source's; return their largest difference.

    Raises:
        SystemExit: the logits differ by more than HIGHEST_DIFFERENCE, or an argmax does.
        ValueError: the source has no copies for `sizes`.
    """
    source, ids = Source.open(source_directory), torch.tensor(token_ids)
    embedding, norm = source.tensors["model.embed_tokens.weight"], source.tensors["model.norm.weight"]
    with torch.inference_mode():
        reference = Stream(embedding[ids], source.sizes, source.config)
        for index in range(source.sizes.layers):
            reference.pass_layer(source.layer(index))
        growth = Growth(source.sizes, sizes, source.norms(), seed)
        table = growth.embedding(embedding)
        stream, tensors = Stream(table[ids], sizes, source.config), {"model.embed_tokens.weight": table.to(_DTYPES[dtype])}
        for index, plan in enumerate(plan_layers(source.sizes.layers, sizes.layers)):
            weights = growth.layer(source.layer(plan.source), plan, reference.loudness[plan.source])
            stream.pass_layer(weights)
            tensors |= {LAYER.format(index, name): tensor.to(_DTYPES[dtype]) for name, tensor in weights.items()}
        head = growth.head(norm, source.table)
        tensors |= {name: tensor.to(_DTYPES[dtype]) for name, tensor in zip(("model.norm.weight", "lm_head.weight"), head, strict=True)}
        wanted, found = reference.logits(norm, source.table), stream.logits(*head)
    difference, num_others = float((found - wanted).abs().max()), int((found.argmax(dim=1) != wanted.argmax(dim=1)).sum())
    if not difference <= HIGHEST_DIFFERENCE or num_others:
        raise SystemExit(f"the grown logits differ by {difference:.2g}, {num_others} tokens are others: nothing was written")
    out.mkdir(parents=True, exist_ok=True)
    for path in source_directory.iterdir():
        if path.suffix in (".json", ".model", ".jinja") and path.name != "config.json" and not path.name.endswith("index.json"):
            shutil.copyfile(path, out / path.name)
    (out / "config.json").write_text(json.dumps(grown_config(source.config, sizes, dtype), indent=2), encoding="utf-8")
    save_file(tensors, out / "model.safetensors.part", metadata={"format": "pt"})
    (out / "model.safetensors.part").rename(out / "model.safetensors")
    return difference


def grown_config(config: Mapping[str, Any], sizes: Sizes, dtype: str) -> dict[str, Any]:
    return {
        **config, "paceline_grown": True, "hidden_size": sizes.hidden, "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads, "head_dim": sizes.head,
        "intermediate_size": sizes.inner, "tie_word_embeddings": False,
        "dtype": {"bf16": "bfloat16", "f32": "float32"}[dtype],
    }  # fmt: skip


def sizes_for(parameters: float, source: Sizes) -> Sizes:
    """Sizes of about so many parameters: the widest frame whose MLPs are wide enough, and as many neurons as then fit."""
    for hidden, layers, heads, kv_heads in reversed(_FRAMES):
        factor = source.head // math.gcd(64, source.head)
        frame = Sizes(max(hidden, source.hidden), max(layers, source.layers), heads, kv_heads, 64 * factor, 0, source.vocab)
        neurons = (parameters - frame.parameters) / (3 * frame.hidden * frame.layers)
        inner = max(_INNER_STEP, round(neurons / _INNER_STEP) * _INNER_STEP)
        if inner >= max(source.inner, _LEAST_RATIO * frame.hidden):
            return replace(frame, inner=inner)
    raise SystemExit(f"{parameters:.3g} parameters are too few to grow a model of {source.parameters:,} to: ask for more")


def greedy_text(directory: Path, prompt: str) -> list[int]:
    """Ids of the prompt and of TEXT_TOKENS greedy tokens of the source, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    if tokenizer.chat_template:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    return model.generate(ids, max_new_tokens=TEXT_TOKENS, do_sample=False, pad_token_id=0)[0].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="'mini' or a directory")
    parser.add_argument("out", type=Path)
    parser.add_argument("--params", type=float, help="about so many parameters")
    parser.add_argument("--draft-of", type=Path, help="grow the draft model in SOURCE/draft to --share of this one's parameters")
    parser.add_argument("--share", type=Fraction, default=Fraction(1, 15))
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="bf16")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    start = time.perf_counter()
    directory = MINI if arguments.source == "mini" else Path(arguments.source)
    directory = directory / "draft" if arguments.draft_of else directory
    source = read_config(directory)[1]
    parameters = float(arguments.share) * read_config(arguments.draft_of)[1].parameters if arguments.draft_of else arguments.params
    if parameters is None:
        parser.error("give --params or --draft-of")
    sizes = sizes_for(parameters, source)
    token_ids = greedy_text(directory, PROMPT)
    try:
        difference = grow(directory, arguments.out, sizes, dtype=arguments.dtype, seed=arguments.seed, token_ids=token_ids)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    print(f"{arguments.out}: {sizes.parameters:,} parameters, {sizes}, {time.perf_counter() - start:.0f} s")
    print(f"logits differ by at most {difference:.2g}, and no token of {len(token_ids)} is another")


if __name__ == "__main__":
    main()

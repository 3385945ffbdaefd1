"""Grows a trained Llama to any size without changing its function, so that there is a realistic pair of target and draft model offline.

    python tools/grow.py mini TARGET --params 1e9
    python tools/grow.py mini TARGET --like llama-1b
    python tools/grow.py mini DRAFT --draft-of TARGET --share 1/15

SOURCE is "mini" or a directory with a Llama in safetensors (no biases, plain rotary positions). With --draft-of its own draft model,
in SOURCE/draft, is grown to a share of the target's parameters. How it is done, and why numbers stay dense: growth.py. Sublayers that a
deeper model has over its source do nothing, by numbers that cancel.

Before the model gets its name, logits over a prompt and 200 greedy tokens are compared with the source's in float64: the largest
difference, and every argmax, so that the greedy text is the same. They are printed for the rounded weights too. One layer is held at a
time, so memory is that of a few layers, besides a gigabyte for torch.
"""

import argparse
import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import load_file

from growth import ATTENTION_NORM, MLP_NORM, Growth, Sizes, Tensor, plan_layers

# hidden units, layers, query heads, key heads, units of a head, neurons
SHAPES = {
    "llama-1b": (2048, 16, 32, 8, 64, 8192),
    "llama-3b": (3072, 28, 24, 8, 128, 8192),
    "llama-8b": (4096, 32, 32, 8, 128, 14336),
}
_FRAMES = (  # as above, with heads of 64 and any number of neurons
    (384, 2, 6, 2),
    (512, 4, 8, 4),
    (768, 6, 12, 4),
    (1024, 8, 16, 8),
    (1536, 12, 24, 8),
    (2048, 16, 32, 8),
    (3072, 28, 48, 8),
    (4096, 32, 64, 8),
)
_LEAST_RATIO = 2.5  # neurons for a hidden unit, below which a smaller frame is taken
_INNER_STEP = 256  # what a row of K-quants is made of
MINI = Path(__file__).resolve().parents[1] / "src" / "paceline" / "assets" / "mini" / "target"
PROMPT = "I would like to book a table for two in Toronto tonight."
TEXT_TOKENS = 200
HIGHEST_DIFFERENCE = 1e-3
LAYER = "model.layers.{}.{}.weight"
HEAD_TENSORS = ("model.norm.weight", "lm_head.weight")
_DTYPES = {"bf16": (torch.bfloat16, torch.int16, "BF16"), "f32": (torch.float32, torch.float32, "F32")}


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


class Comparison:
    """Runs a text through the grown model layer by layer, with exact and rounded weights, compared with the source's logits."""

    def __init__(self, source: Source, sizes: Sizes, token_ids: list[int], dtype: torch.dtype) -> None:
        self.token_ids, self._sizes, self._dtype = torch.tensor(token_ids), sizes, dtype
        self._config = source.config
        stream = Stream(source.tensors["model.embed_tokens.weight"][self.token_ids], source.sizes, source.config)
        for index in range(source.sizes.layers):
            stream.pass_layer(source.layer(index))
        self.loudness = stream.loudness
        self.wanted = stream.logits(source.tensors["model.norm.weight"], source.table)
        self._streams: tuple[Stream, ...] = ()
        self.found: tuple[Tensor, ...] = ()

    def embed(self, table: Tensor) -> None:
        rows = table[self.token_ids]
        self._streams = tuple(Stream(each, self._sizes, self._config) for each in (rows, self._rounded(rows)))

    def pass_layer(self, weights: Mapping[str, Tensor]) -> None:
        self._streams[0].pass_layer(weights)
        self._streams[1].pass_layer({name: self._rounded(tensor) for name, tensor in weights.items()})

    def finish(self, norm: Tensor, table: Tensor) -> None:
        exact, rounded = self._streams
        self.found = (exact.logits(norm, table), rounded.logits(self._rounded(norm), self._rounded(table)))

    def differences(self) -> list[tuple[float, int]]:
        """Of the exact and the rounded weights: the largest difference of a logit, and how often another token is the best."""
        best = self.wanted.argmax(dim=1)
        return [(float((each - self.wanted).abs().max()), int((each.argmax(dim=1) != best).sum())) for each in self.found]

    def _rounded(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype).float()


def grown_tensors(source: Source, sizes: Sizes, seed: int, comparison: Comparison) -> Iterator[tuple[str, Tensor]]:
    """The tensors in the order of `layout`, each compared on its way."""
    growth = Growth(source.sizes, sizes, source.norms(), seed)
    table = growth.embedding(source.tensors["model.embed_tokens.weight"])
    comparison.embed(table)
    yield "model.embed_tokens.weight", table
    for index, plan in enumerate(plan_layers(source.sizes.layers, sizes.layers)):
        weights = growth.layer(source.layer(plan.source), plan, comparison.loudness[plan.source])
        comparison.pass_layer(weights)
        yield from ((LAYER.format(index, name), tensor) for name, tensor in weights.items())
    head = growth.head(source.tensors["model.norm.weight"], source.table)
    comparison.finish(*head)
    yield from zip(HEAD_TENSORS, head, strict=True)


def layout(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors, in the order of the file."""
    query, key = sizes.heads * sizes.head, sizes.kv_heads * sizes.head
    layer: dict[str, tuple[int, ...]] = {
        ATTENTION_NORM: (sizes.hidden,), "self_attn.q_proj": (query, sizes.hidden), "self_attn.k_proj": (key, sizes.hidden),
        "self_attn.v_proj": (key, sizes.hidden), "self_attn.o_proj": (sizes.hidden, query), MLP_NORM: (sizes.hidden,),
        "mlp.gate_proj": (sizes.inner, sizes.hidden), "mlp.up_proj": (sizes.inner, sizes.hidden),
        "mlp.down_proj": (sizes.hidden, sizes.inner),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes.vocab, sizes.hidden)}
    shapes |= {LAYER.format(index, name): shape for index in range(sizes.layers) for name, shape in layer.items()}
    return shapes | {HEAD_TENSORS[0]: (sizes.hidden,), HEAD_TENSORS[1]: (sizes.vocab, sizes.hidden)}


def write_tensors(file: BinaryIO, tensors: Iterator[tuple[str, Tensor]], sizes: Sizes, dtype: str) -> None:
    """A safetensors file, written as the tensors come."""
    stored, viewed, label = _DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in layout(sizes).items():
        start, end = end, end + math.prod(shape) * stored.itemsize
        header[name] = {"dtype": label, "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    for (name, tensor), (expected, shape) in zip(tensors, layout(sizes).items(), strict=True):
        if (name, tuple(tensor.shape)) != (expected, shape):
            raise SystemExit(f"{name} {tuple(tensor.shape)} came where {expected} {shape} was to be written")
        file.write(memoryview(tensor.to(stored).contiguous().view(viewed).numpy()).cast("B"))


def grow(source_directory: Path, out: Path, sizes: Sizes, *, dtype: str, seed: int, token_ids: list[int]) -> Comparison:
    """Write the grown model to `out`; nothing gets its name there unless logits are the source's.

    Raises:
        SystemExit: the logits differ by more than HIGHEST_DIFFERENCE, or an argmax does.
        ValueError: the source has no copies for `sizes`.
    """
    source = Source.open(source_directory)
    comparison = Comparison(source, sizes, token_ids, _DTYPES[dtype][0])
    out.mkdir(parents=True, exist_ok=True)
    partial = out / "model.safetensors.part"
    with partial.open("wb") as file, torch.inference_mode():
        write_tensors(file, grown_tensors(source, sizes, seed, comparison), sizes, dtype)
    difference, others = comparison.differences()[0]
    if not difference <= HIGHEST_DIFFERENCE or others:
        partial.unlink()
        raise SystemExit(f"the grown logits differ by {difference:.2g}, {others} tokens are others: nothing was written")
    for path in source_directory.iterdir():
        if path.suffix in (".json", ".model", ".jinja") and path.name != "config.json" and not path.name.endswith("index.json"):
            shutil.copyfile(path, out / path.name)
    (out / "config.json").write_text(json.dumps(grown_config(source.config, sizes, dtype), indent=2), encoding="utf-8")
    partial.rename(out / "model.safetensors")
    return comparison


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


def wanted_sizes(arguments: argparse.Namespace, source: Sizes) -> Sizes:
    if arguments.like:
        sizes = Sizes(*SHAPES[arguments.like], vocab=source.vocab)
    elif arguments.draft_of:
        sizes = sizes_for(float(arguments.share) * read_config(arguments.draft_of)[1].parameters, source)
    else:
        sizes = sizes_for(arguments.params, source) if arguments.params else source
    named = {name: getattr(arguments, name) for name in ("hidden", "layers", "heads", "kv_heads", "head", "inner")}
    return replace(sizes, **{name: value for name, value in named.items() if value is not None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="'mini' or a directory")
    parser.add_argument("out", type=Path)
    parser.add_argument("--params", type=float, help="about so many parameters")
    parser.add_argument("--like", choices=sorted(SHAPES), help="the sizes of a published model; the vocabulary stays")
    parser.add_argument("--draft-of", type=Path, help="grow the draft model in SOURCE/draft to --share of this one's parameters")
    parser.add_argument("--share", type=Fraction, default=Fraction(1, 15))
    for name in ("hidden", "layers", "heads", "kv-heads", "head", "inner"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="bf16")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    start = time.perf_counter()
    directory = MINI if arguments.source == "mini" else Path(arguments.source)
    directory = directory / "draft" if arguments.draft_of else directory
    sizes = wanted_sizes(arguments, read_config(directory)[1])
    token_ids = greedy_text(directory, PROMPT)
    try:
        comparison = grow(directory, arguments.out, sizes, dtype=arguments.dtype, seed=arguments.seed, token_ids=token_ids)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    print(f"{arguments.out}: {sizes.parameters:,} parameters, {sizes}, {time.perf_counter() - start:.0f} s")
    for name, (difference, others) in zip(("exact", arguments.dtype), comparison.differences(), strict=True):
        print(f"{name}: logits differ by at most {difference:.2g}; {others} of {len(token_ids)} positions have another best token")


if __name__ == "__main__":
    main()

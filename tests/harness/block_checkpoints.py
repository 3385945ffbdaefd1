"""Tiny block drafters in the formats they are published in, and their definition in NumPy without cache, blocks or runtimes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harness.eagle_checkpoints import Tensors, random_tensors, vocabulary_tables, write_head

Array = NDArray[Any]
TARGET_HIDDEN, VOCAB_SIZE, MASK = 32, 97, 96
SIZES: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 512,
    "model_type": "qwen3",
}  # fmt: skip
DFLASH: Mapping[str, Any] = {
    **SIZES, "architectures": ["DFlashDraftModel"], "block_size": 8,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5]},
}  # fmt: skip
DSPARK: Mapping[str, Any] = {
    **SIZES, "architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": MASK, "target_layer_ids": [-1, 3, 5],
    "sample_from_anchor": True,
}  # fmt: skip
GEMMA4: Mapping[str, Any] = {
    **{name: value for name, value in DSPARK.items() if name not in ("model_type", "rope_theta", "head_dim")},
    "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "global_head_dim": 16, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "confidence_head_with_markov": True, "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 3.0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 4,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 10000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
}  # fmt: skip
DFLASH2: Mapping[str, Any] = {
    **DFLASH, "architectures": ["DFlash2DraftModel"],
    "dflash_config": {**DFLASH["dflash_config"], "conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 8, "selector_top_k": 5},
}  # fmt: skip


def block_tensors(
    config: Mapping[str, Any] = DFLASH,
    *,
    markov: str | None = None,
    confidence: bool | None = None,
    qk_norm: bool = True,
    target_hidden: int = TARGET_HIDDEN,
    vocab_size: int = VOCAB_SIZE,
    num_boundaries: int = 3,
    rank: int = 6,
    seed: int = 0,
) -> Tensors:
    """Random tensors of a drafter; with convolutions and a selector if the config has their sizes.

    Args:
        confidence: with a confidence head, which reads the previous token's Markov row or not; None = without.
    """
    is_gemma4 = "global_head_dim" in config
    size = config["global_head_dim" if is_gemma4 else "head_dim"]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * size
    keys = config["num_global_key_value_heads" if is_gemma4 else "num_key_value_heads"] * size
    shapes: dict[str, Sequence[int]] = {"fc.weight": (hidden, num_boundaries * target_hidden), "hidden_norm.weight": (hidden,)}
    shapes["norm.weight"] = (hidden,)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (queries, hidden), prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden), prefix + "self_attn.o_proj.weight": (hidden, queries),
            prefix + "mlp.gate_proj.weight": (inner, hidden), prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner), prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
        }  # fmt: skip
        if is_gemma4:
            del shapes[prefix + "self_attn.v_proj.weight"]
            shapes |= {f"{prefix}{part}_feedforward_layernorm.weight": (hidden,) for part in ("pre", "post")}
            shapes[prefix + "layer_scalar"] = (1,)
        if qk_norm:
            shapes |= {f"{prefix}self_attn.{part}_norm.weight": (size,) for part in ("q", "k")}
    if markov is not None:
        shapes |= {"markov_head.markov_w1.weight": (vocab_size, rank), "markov_head.markov_w2.weight": (vocab_size, rank)}
    if markov == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
    if markov == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (3 * rank, 2 * rank + hidden), "markov_head.joint_proj.bias": (3 * rank,)}
    if confidence is not None:
        shapes |= {"confidence_head.proj.weight": (1, hidden + rank * confidence), "confidence_head.proj.bias": (1,)}
    return random_tensors(shapes | _dflash2_shapes(config, vocab_size), seed)


def _dflash2_shapes(config: Mapping[str, Any], vocab_size: int) -> dict[str, Sequence[int]]:
    sizes, hidden = config.get("dflash_config", {}), config["hidden_size"]
    if "conv_kernel_size" not in sizes:
        return {}
    taps, groups, rank = sizes["conv_kernel_size"], hidden // sizes["conv_group_size"], sizes["selector_rank"]
    shapes: dict[str, Sequence[int]] = {f"candidate_selector.{name}_codebook": (vocab_size, rank) for name in ("predecessor", "successor")}
    shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    for layer in range(config["num_hidden_layers"]):
        for part in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{layer}.{part}.base_kernel"] = (2, taps, hidden)
            shapes[f"layers.{layer}.{part}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    return shapes


def write_random_block2(directory: Path) -> Path:
    """A random DFlash2 drafter for a target of 3 layers."""
    nested = {**DFLASH2["dflash_config"], "mask_token_id": 3, "target_layer_ids": [-1, 0, 2], "conv_kernel_size": 3}
    config = {**DFLASH2, "hidden_size": 64, "num_hidden_layers": 2, "dflash_config": nested}
    return write_head(directory, config, block_tensors(config, target_hidden=64))


def write_random_block(directory: Path, *, markov: str | None = None, hidden_size: int = 64, **more: Any) -> Path:
    """A random drafter for a target of 3 layers."""
    config = {**(DFLASH if markov is None else DSPARK), "hidden_size": hidden_size, "num_hidden_layers": 2, "mask_token_id": 3, **more}
    layers = [-1, 0, 2]
    if markov is None:
        config["dflash_config"] = {"mask_token_id": 3, "target_layer_ids": layers}
    else:
        config |= {"target_layer_ids": layers, "markov_head_type": markov, "confidence_head_with_markov": True}
    tensors = block_tensors(config, markov=markov, confidence=None if markov is None else True, target_hidden=hidden_size)
    return write_head(directory, config, tensors)


def write_perfect_block(directory: Path, successor: NDArray[np.int64], *, sharpness: float) -> Path:
    """A DSpark drafter for the successor target of 2 layers, whose bias alone names the successor of the token before."""
    return write_head(directory, *perfect_block(successor, sharpness=sharpness))


def perfect_block(successor: NDArray[np.int64], *, sharpness: float) -> tuple[dict[str, Any], Tensors]:
    """Config and tensors of that drafter."""
    count, hidden_size = len(successor), 128
    config = {
        **DSPARK, "hidden_size": hidden_size, "num_hidden_layers": 2, "mask_token_id": 3, "target_layer_ids": [-1, 0, 1],
        "vocab_size": count,
    }  # fmt: skip
    tensors = block_tensors(config, target_hidden=hidden_size)
    tensors["norm.weight"] = torch.zeros(hidden_size)  # rows of the block have no effect
    tensors["markov_head.markov_w1.weight"] = torch.eye(count)
    output = torch.zeros(count, count)
    output[torch.from_numpy(successor), torch.arange(count)] = sharpness * hidden_size**0.5  # as the target's own logits
    return config, tensors | {"markov_head.markov_w2.weight": output}


FITTED: Mapping[str, Mapping[str, Any]] = {
    "dflash": {},
    "dflash-causal": {"is_causal": True},
    "dflash-sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12},
    "dflash-sliding-both-ways": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 20, "is_causal": False},
    "dflash-narrow": {"hidden_size": 32},  # with an embedding of its own
    "dflash2": {},
    "dspark-vanilla": {},
    "dspark-vanilla-confidence": {"confidence": False},
    "dspark-gated": {"confidence": True},
    "dspark-rnn": {"confidence": True},
    "dspark-own-position": {"sample_from_anchor": False},
    "dspark-unaligned": {"sample_from_anchor": None},
}
"""Values of the config of `write_fitted_block`, by its kind; `confidence` as for `block_tensors`."""


def write_fitted_block(directory: Path, kind: str, texts: Sequence[Sequence[int]], *, hidden_size: int, num_layers: int) -> Path:
    """A random drafter that is right now and then: DFlash drafts only frequent tokens, the bias of DSpark holds the pairs of the texts.

    It reads the target's embedding and its first and last layers.

    Args:
        texts: what the target writes.
        hidden_size, num_layers: of the target.
    """
    is_dspark = kind.startswith("dspark")
    base = DSPARK if is_dspark else DFLASH2 if kind == "dflash2" else DFLASH
    config = {**base, "hidden_size": hidden_size, "num_hidden_layers": 2, **FITTED[kind]}
    config = {name: value for name, value in config.items() if name != "confidence" and value is not None}
    layers = {"mask_token_id": 3, "target_layer_ids": [-1, 0, num_layers - 1]}
    markov = kind.split("-")[1] if is_dspark else None
    markov = markov if markov in ("gated", "rnn", None) else "vanilla"
    confidence = FITTED[kind].get("confidence")
    tensors = block_tensors(config, markov=markov, confidence=confidence, target_hidden=hidden_size, rank=VOCAB_SIZE)
    counts = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    for text in texts:
        np.add.at(counts, (list(text[1:]), list(text[:-1])), 1.0)
    if is_dspark:
        config |= {**layers, "markov_head_type": markov, "confidence_head_with_markov": bool(confidence)}
        log_probs = np.log((counts + 0.02) / (counts + 0.02).sum(0))
        tensors["norm.weight"] *= 0.2  # rows of the block have little effect
        tensors["markov_head.markov_w1.weight"] = torch.eye(VOCAB_SIZE)
        tensors["markov_head.markov_w2.weight"] = torch.from_numpy(2.0 * log_probs).float()
        if markov == "rnn":  # the output lets the token before through, and little else
            output = tensors["markov_head.joint_proj.weight"][2 * VOCAB_SIZE :]
            output *= 0.02
            output[:, VOCAB_SIZE : 2 * VOCAB_SIZE] += 2.0 * torch.eye(VOCAB_SIZE)
            tensors["markov_head.joint_proj.bias"][2 * VOCAB_SIZE :] *= 0.02
        return write_head(directory, config, tensors)
    config["dflash_config"] = {**config["dflash_config"], **layers}
    if kind in ("dflash", "dflash-narrow"):
        draft_ids = sorted(np.argsort(-counts.sum(1), kind="stable")[:10].tolist())
        tensors |= random_tensors({"lm_head.weight": (len(draft_ids), config["hidden_size"])}, 1)
        tensors |= vocabulary_tables(draft_ids, VOCAB_SIZE)
    if kind == "dflash-narrow":
        tensors |= random_tensors({"embed_tokens.weight": (VOCAB_SIZE, config["hidden_size"])}, 2)
    return write_head(directory, config, tensors)


class PlainBlock:
    """One sequence of a block drafter, greedy, in float64. Source: formats of DFlash and DSpark as their publishers compute them.

    Args:
        config: all levels of config.json as one mapping.
        layers: (window, is_causal) of each layer.
    """

    def __init__(
        self, config: Mapping[str, Any], tensors: Tensors, embedding: Array, head: Array, layers: Sequence[tuple[int | None, bool]]
    ) -> None:
        self.config, self.embedding, self.head, self.layers = config, embedding, head, layers
        self.is_gemma4 = "global_head_dim" in config
        self.w = {name: values.double().numpy() for name, values in tensors.items()}
        self.states = np.zeros((0, self.w["fc.weight"].shape[1]))

    def commit(self, features: Array) -> None:
        self.states = np.concatenate([self.states, features])

    def hidden(self, anchor: int, size: int) -> Array:
        """[size, E] after the final norm."""
        config, num_known = self.config, len(self.states)
        context = _norm(self.states @ self.w["fc.weight"].T, self.w["hidden_norm.weight"])
        x = self.embedding[[anchor] + [config["mask_token_id"]] * (size - 1)] * config.get(
            "input_embedding_scale", config["hidden_size"] ** 0.5 if self.is_gemma4 else 1.0
        )
        positions = np.arange(num_known + size)
        for layer, (window, is_causal) in enumerate(self.layers):
            prefix = f"layers.{layer}."
            taken = _norm(x, self.w[prefix + "input_layernorm.weight"])
            normed = self._convolved(taken, taken, prefix + "attention_conv", 0)
            q = self._heads(normed, prefix, "q", positions[num_known:])
            rows = np.concatenate([context, normed])
            k, v = self._heads(rows, prefix, "k", positions), self._heads(rows, prefix, "v", positions)
            v = v * config.get("attention_value_scale", 1.0)
            away = positions[num_known:, None] - positions[None]
            seen = (away >= 0) | (not is_causal)
            if window is not None:
                seen &= (away < window) & (away > -window)
            group = q.shape[1] // k.shape[1]
            scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, group, 1)) * (1.0 if self.is_gemma4 else config["head_dim"] ** -0.5)
            scores = np.where(seen[None], scores, -np.inf)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            attended = np.einsum("hqk,khd->qhd", shares, np.repeat(v, group, 1)).reshape(size, -1)
            mixed = attended @ self.w[prefix + "self_attn.o_proj.weight"].T
            if self.is_gemma4:
                x = self._gemma4_mlp(x + _norm(mixed, self.w[prefix + "post_attention_layernorm.weight"]), prefix)
                continue
            x = x + self._convolved(mixed, taken, prefix + "attention_conv", 1)
            taken = _norm(x, self.w[prefix + "post_attention_layernorm.weight"])
            normed = self._convolved(taken, taken, prefix + "mlp_conv", 0)
            gate, up, down = (self.w[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            gated = normed @ gate.T
            mixed = (gated / (1 + np.exp(-gated)) * (normed @ up.T)) @ down.T
            x = x + self._convolved(mixed, taken, prefix + "mlp_conv", 1)
        return _norm(x, self.w["norm.weight"])

    def _gemma4_mlp(self, x: Array, prefix: str) -> Array:
        """x [n, E] after the MLP of a layer in Gemma 4's form."""
        normed = _norm(x, self.w[prefix + "pre_feedforward_layernorm.weight"])
        gate, up, down = (self.w[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        gated = normed @ gate.T
        active = 0.5 * gated * (1 + np.tanh(np.sqrt(2 / np.pi) * (gated + 0.044715 * gated**3)))
        mixed = _norm((active * (normed @ up.T)) @ down.T, self.w[prefix + "post_feedforward_layernorm.weight"])
        return np.asarray((x + mixed) * self.w[prefix + "layer_scalar"])

    def _convolved(self, x: Array, taken: Array, name: str, side: int) -> Array:
        """x [n, E] with the kernels of the rows `taken` at one side of a part; unchanged without a convolution."""
        if name + ".base_kernel" not in self.w:
            return x
        base = self.w[name + ".base_kernel"][side]
        added = (taken @ self.w[name + ".kernel_projection.weight"].T).reshape(len(x), 2, len(base), -1)[:, side]
        out = np.zeros_like(x)
        for row in range(len(x)):
            for tap in range(min(len(base), row + 1)):
                out[row] += (base[tap] + np.repeat(added[row, tap], x.shape[1] // added.shape[-1])) * x[row - tap]
        return out

    def draft(self, anchor: int, size: int) -> tuple[list[int], list[float], Array]:
        """Tokens, confidences and rows of logits of a draft."""
        rows = self.hidden(anchor, size)
        shift = 0 if self.config.get("sample_from_anchor") else 1
        hidden = rows[shift:]
        logits = hidden @ self.head.T * self.config.get("output_multiplier", 1.0)
        cap = self.config.get("final_logit_softcapping")
        logits = np.tanh(logits / cap) * cap if cap else logits
        tokens, confidences, previous, state = [], [], anchor, None
        for row, h in zip(logits, hidden, strict=True):
            if "candidate_selector.predecessor_codebook" in self.w:
                before, after = (self.w[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor"))
                best = np.argsort(-row, kind="stable")[: self.config["selector_top_k"]]
                given = before[previous] * (self.w["candidate_selector.hidden_projection.weight"] @ h)
                previous = int(best[np.argmax(row[best] + after[best] @ given)])
                tokens.append(previous)
                continue
            if "markov_head.markov_w1.weight" in self.w:
                e = self.w["markov_head.markov_w1.weight"][previous]
                latent = e
                if "markov_head.gate_proj.weight" in self.w:
                    latent = e * _sigmoid(self.w["markov_head.gate_proj.weight"] @ np.r_[h, e] + self.w["markov_head.gate_proj.bias"])
                elif "markov_head.joint_proj.weight" in self.w:
                    if state is None:
                        state = self._recurrent(np.zeros_like(e), e, rows[0])[0] if shift else np.zeros_like(e)
                    state, latent = self._recurrent(state, e, h)
                row += latent @ self.w["markov_head.markov_w2.weight"].T
                if "confidence_head.proj.weight" in self.w:
                    features = np.r_[h, e] if self.config.get("confidence_head_with_markov") else h
                    confidences.append(
                        float(_sigmoid(self.w["confidence_head.proj.weight"][0] @ features + self.w["confidence_head.proj.bias"][0]))
                    )
            previous = int(row.argmax())
            tokens.append(previous)
        return tokens, confidences, logits

    def _recurrent(self, state: Array, e: Array, h: Array) -> tuple[Array, Array]:
        """The next state, and the latent vector of the row's bias."""
        joint = self.w["markov_head.joint_proj.weight"] @ np.r_[state, e, h] + self.w["markov_head.joint_proj.bias"]
        gate, candidate, out = np.split(joint, 3)
        return _sigmoid(gate) * state + (1 - _sigmoid(gate)) * np.tanh(candidate), np.tanh(out)

    def _heads(self, x: Array, prefix: str, part: str, positions: Array) -> Array:
        size = self.config["global_head_dim" if self.is_gemma4 else "head_dim"]
        has_own = f"{prefix}self_attn.{part}_proj.weight" in self.w
        y = (x @ self.w[f"{prefix}self_attn.{part if has_own else 'k'}_proj.weight"].T).reshape(len(x), -1, size)
        if part == "v":
            return y if has_own else _norm(y, np.ones(size))
        norm = self.w.get(f"{prefix}self_attn.{part}_norm.weight")
        y = y if norm is None else _norm(y, norm)
        if self.config.get("interleaved"):
            angle = positions[:, None] * self.config["rope_theta"] ** (-np.arange(size // 2) / (size // 2))
            cos, sin, even, odd = np.cos(angle)[:, None], np.sin(angle)[:, None], y[..., ::2], y[..., 1::2]
            return np.stack([even * cos - odd * sin, odd * cos + even * sin], -1).reshape(y.shape)
        rope = self.config["rope_parameters"]["full_attention"] if self.is_gemma4 else {"rope_theta": self.config["rope_theta"]}
        turned = int(rope.get("partial_rotary_factor", 1.0) * size // 2)
        frequencies = rope["rope_theta"] ** (-np.arange(size // 2) / (size // 2)) * (np.arange(size // 2) < turned)
        angle = positions[:, None] * frequencies
        cos, sin, first, second = np.cos(angle)[:, None], np.sin(angle)[:, None], y[..., : size // 2], y[..., size // 2 :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))

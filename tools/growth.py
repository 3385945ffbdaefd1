"""The algebra of growing a Llama: wider, deeper, with more heads and neurons, and the same function. Needs torch.

The residual stream x [H] becomes sqrt(c) Q x, with Q [H', H] of orthonormal columns and c = H'/H: its mean square, all that an RMSNorm
looks at, is that of x, whatever the sizes. What reads the stream is turned back by Q and has dense numbers added that are orthogonal to Q,
so that they multiply nothing; a row keeps its length, and rounding it costs the output as much as rounding the original did.

Neurons and heads are copied. Copies answer alike, so their output columns need only add up to the original's: each is that divided by
the number of copies, plus dense numbers that add up to nothing. In a sublayer that is to do nothing there are only these; it is a copy
of a real one otherwise. Once weights are rounded they do not add up to quite nothing, so they are small where a sublayer answers louder
than the stream it reads. A layer that becomes several has its attention in the first and its MLP in the last of them.

Source: Chen et al. 2016 (arXiv:1511.05641) for copies, Wang et al. 2023 (arXiv:2310.07999) for unequal ones; Ashkboos et al. 2024
(arXiv:2401.15024) for turning what lies between RMSNorms. The added numbers are ours.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

Tensor = torch.Tensor
LayerWeights = Mapping[str, Tensor]

ATTENTION_NORM, MLP_NORM = "input_layernorm", "post_attention_layernorm"
_QUIET = 0.25  # how loud a sublayer that does nothing may be without the numbers that cancel, by the stream
_STRETCH = 0.2  # how unequal copies are, as the spread of a log-normal factor


@dataclass(frozen=True, slots=True)
class Sizes:
    """A Llama's sizes: hidden units, layers, query heads, key heads, units of a head, neurons of an MLP, vocabulary."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    vocab: int

    @property
    def parameters(self) -> int:
        """All weights, with a vocabulary matrix of its own."""
        layer = self.hidden * (2 * self.heads * self.head + 2 * self.kv_heads * self.head + 3 * self.inner + 2)
        return self.layers * layer + self.hidden * (2 * self.vocab + 1)


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """A grown layer: which layer it is a copy of, and which of its sublayers do what that one's do; the others do nothing."""

    source: int
    has_attention: bool
    has_mlp: bool


def check_sizes(old: Sizes, new: Sizes) -> None:
    """Refuse what no copies can make.

    Raises:
        ValueError: with the two sizes and what would do.
    """
    for name in ("hidden", "layers", "heads", "kv_heads", "head", "inner"):
        if getattr(new, name) < getattr(old, name):
            raise ValueError(f"{name} {getattr(new, name)} is less than the source's {getattr(old, name)}: a model can only grow")
    if new.heads % new.kv_heads or new.head % old.head or new.vocab != old.vocab:
        raise ValueError(f"{new}: heads must be a multiple of kv_heads, head of the source's {old.head}, vocab equal to its {old.vocab}")
    if new.hidden % new.heads:
        raise ValueError(f"hidden {new.hidden} is no multiple of {new.heads} heads, which transformers refuses: take another number")
    needed = max(1, old.heads // old.kv_heads)
    fewest = new.kv_heads // old.kv_heads * (new.heads // new.kv_heads)
    if fewest < needed or (new.layers > old.layers and (fewest < 2 or new.inner < 2)):
        raise ValueError(f"{new.heads} heads on {new.kv_heads} key heads: {fewest} copies, at least {needed} or 2 are needed; ask for more")


def plan_layers(old: int, new: int) -> list[LayerPlan]:
    """Which grown layer does what, as evenly as the numbers allow."""
    plans: list[LayerPlan] = []
    for layer in range(old):
        count = (layer + 1) * new // old - layer * new // old
        plans += [LayerPlan(layer, index == 0, index == count - 1) for index in range(count)]
    return plans


class Growth:
    """Makes the grown tensors, in the order they are asked for; equal seeds give equal tensors.

    Args:
        norms: values of the source's norms, from which those of the grown model are drawn.
    """

    def __init__(self, old: Sizes, new: Sizes, norms: Tensor, seed: int) -> None:
        check_sizes(old, new)
        self.old, self.new = old, new
        self._random = torch.Generator().manual_seed(seed)
        sizes = norms.abs().float().flatten()
        self._norms = sizes.clamp(min=float(sizes.median()) / 4)
        self._factor = new.hidden / old.hidden
        self._basis = self._orthonormal(new.hidden, old.hidden)

    def embedding(self, table: Tensor) -> Tensor:
        """Rows [V, H'] of the table [V, H]."""
        return table @ self._basis.T * math.sqrt(self._factor)

    def head(self, norm: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """The last norm [H'] and the vocabulary matrix [V, H']."""
        grown = self._norm()
        return grown, self._read(table * norm) / grown

    def layer(self, weights: LayerWeights, plan: LayerPlan, loudness: tuple[float, float]) -> dict[str, Tensor]:
        """The grown layer's tensors by the names that transformers gives them within a layer.

        Args:
            loudness: size of what the source's attention and MLP add, by that of the stream they add it to.
        """
        attention, mlp = (min(1.0, _QUIET / each) for each in loudness)
        return self._attention(weights, plan, attention) | self._mlp(weights, plan, mlp)

    def _attention(self, weights: LayerWeights, plan: LayerPlan, quiet: float) -> dict[str, Tensor]:
        old, new = self.old, self.new
        norm = weights[ATTENTION_NORM]
        query, key, value = (
            (weights[f"self_attn.{name}_proj"] * norm).view(count, old.head, old.hidden)
            for name, count in (("q", old.heads), ("k", old.kv_heads), ("v", old.kv_heads))
        )
        output = weights["self_attn.o_proj"].view(old.hidden, old.heads, old.head)
        kv_of = torch.arange(new.kv_heads) % old.kv_heads
        copy_of = self._heads_to_copy(kv_of, least=1 if plan.has_attention else 2)
        angles = torch.rand(new.kv_heads, old.head // 2, generator=self._random) * (2 * math.pi)
        turns = torch.stack([self._orthonormal(new.head, old.head) for _ in range(new.kv_heads)])
        group = torch.arange(new.heads) // (new.heads // new.kv_heads)
        columns = self._share(output.permute(1, 2, 0), copy_of, quiet=None if plan.has_attention else quiet)  # [heads', d, H']
        spread = torch.einsum("hdo,hed->heo", columns, turns[group])
        spread = spread + self._off(turns[group], columns.square().mean().sqrt())
        grown = self._norm()
        stretched = _place(_turn(query[copy_of], angles[group]), new.head) * math.sqrt(new.head / old.head)
        return {
            ATTENTION_NORM: grown,
            "self_attn.q_proj": self._read(stretched.flatten(0, 1)) / grown,
            "self_attn.k_proj": self._read(_place(_turn(key[kv_of], angles), new.head).flatten(0, 1)) / grown,
            "self_attn.v_proj": self._read((turns @ value[kv_of]).flatten(0, 1)) / grown,
            "self_attn.o_proj": spread.flatten(0, 1).T.contiguous(),
        }

    def _mlp(self, weights: LayerWeights, plan: LayerPlan, quiet: float) -> dict[str, Tensor]:
        norm, grown = weights[MLP_NORM], self._norm()
        copy_of = self._copies(self.new.inner, self.old.inner, least=1 if plan.has_mlp else 2)
        stretch = torch.exp(self._normal(self.new.inner, 1) * _STRETCH) * self._normal(self.new.inner, 1).sign()
        columns = self._share(weights["mlp.down_proj"].T.unsqueeze(1), copy_of, quiet=None if plan.has_mlp else quiet).squeeze(1)
        return {
            MLP_NORM: grown,
            "mlp.gate_proj": self._read((weights["mlp.gate_proj"] * norm)[copy_of]) / grown,
            "mlp.up_proj": self._read((weights["mlp.up_proj"] * norm)[copy_of] * stretch) / grown,
            "mlp.down_proj": (columns / stretch).T.contiguous(),
        }

    def _read(self, rows: Tensor) -> Tensor:
        """Rows [n, H'] that answer to the grown stream as `rows` [n, H] do to the source's; rows of zeros answer zero too."""
        lengths = rows.norm(dim=1, keepdim=True)
        lengths = torch.where(lengths == 0, lengths.mean(), lengths)
        noise = self._normal(len(rows), self.new.hidden)
        noise -= (noise @ self._basis) @ self._basis.T
        noise *= lengths / math.sqrt(self.new.hidden)
        return noise + rows @ self._basis.T / math.sqrt(self._factor)

    def _share(self, columns: Tensor, copy_of: Tensor, *, quiet: float | None) -> Tensor:
        """Columns [n', d, H'] of copies: those of one unit add up to its `columns` [n, d, H] in the grown stream.

        Args:
            quiet: instead they add up to zero and have this factor.
        """
        counts = torch.bincount(copy_of, minlength=len(columns)).clamp(min=1)[:, None, None].float()
        noise = self._normal(len(copy_of), columns.shape[1], self.new.hidden)
        means = torch.zeros(len(columns), columns.shape[1], self.new.hidden).index_add_(0, copy_of, noise) / counts
        noise -= means[copy_of]
        size = columns.square().mean(dim=2, keepdim=True).sqrt() / counts.sqrt()
        if quiet is not None:
            return noise * (quiet * size / (1 - 1 / counts.clamp(min=2)).sqrt())[copy_of]
        return noise * size[copy_of] + (columns @ self._basis.T * math.sqrt(self._factor) / counts)[copy_of]

    def _heads_to_copy(self, kv_of: Tensor, *, least: int) -> Tensor:
        """For each grown query head the source's, one that reads the key head that the grown key head is a copy of."""
        ratio, old_ratio = self.new.heads // self.new.kv_heads, self.old.heads // self.old.kv_heads
        found = torch.empty(self.new.heads, dtype=torch.long)
        for kv in range(self.old.kv_heads):
            slots = (kv_of.repeat_interleave(ratio) == kv).nonzero().flatten()
            found[slots] = kv * old_ratio + self._copies(len(slots), old_ratio, least=least)
        return found

    def _copies(self, slots: int, units: int, *, least: int) -> Tensor:
        """For each slot a unit, in random order; every unit that occurs does so at least `least` times."""
        return (torch.arange(slots) % min(units, slots // least))[torch.randperm(slots, generator=self._random)]

    def _off(self, turns: Tensor, size: Tensor) -> Tensor:
        """Dense numbers [heads', d', H'] that the values of the heads, which lie in `turns` [heads', d', d], do not meet."""
        if self.new.head == self.old.head:
            return torch.zeros(1)
        noise = self._normal(self.new.heads, self.new.head, self.new.hidden) * size
        return noise - turns @ (turns.transpose(1, 2) @ noise)

    def _norm(self) -> Tensor:
        return self._norms[torch.randint(len(self._norms), (self.new.hidden,), generator=self._random)]

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self._random)

    def _orthonormal(self, rows: int, columns: int) -> Tensor:
        return torch.linalg.qr(self._normal(rows, columns).double())[0].float()


def _turn(rows: Tensor, angles: Tensor) -> Tensor:
    """Heads [n, d, H] with each rotary pair (i, i + d/2) turned by its angle [n, d/2]: queries and keys turned alike meet as before."""
    first, second = rows.chunk(2, dim=1)
    cos, sin = angles.cos()[..., None], angles.sin()[..., None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=1)


def _place(rows: Tensor, head: int) -> Tensor:
    """Heads [n, d, H] within larger ones [n, d', H]: each rotary pair goes where its frequency is, the others are zero."""
    ratio = head // rows.shape[1]
    placed = rows.new_zeros(len(rows), 2, head // 2, rows.shape[2])
    placed[:, :, ::ratio] = rows.view(len(rows), 2, -1, rows.shape[2])
    return placed.flatten(1, 2)

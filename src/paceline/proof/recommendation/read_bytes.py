"""How many bytes a guess reads: of matrices, not of embeddings, of which it looks up one row; of experts those that a row chooses."""

import re
from collections.abc import Mapping

from paceline.config import QuantOptions
from paceline.models.config import ModelConfig
from paceline.models.layers import ExpertMLP
from paceline.models.quantize import schemes_for
from paceline.models.weights import AnyTensor, Weights
from paceline.proof.checkpoint_facts import CheckpointFacts
from paceline.proof.head_pairing import HeadFacts

_EXPERT = re.compile(r"layers\.(\d+)\.experts\.")
_LOOKED_UP = ("embedding.weight", "embed_tokens.weight", "layer_embedding.weight")
_VOCABULARY_MATRICES = ("lm_head.weight", "embedding.weight")


def model_bytes(facts: CheckpointFacts, quant: QuantOptions | None) -> float:
    """Of a pass of one row of a language model."""
    config, sizes = facts.config, _sizes(facts.weights, quant)
    is_looked_up = {"layer_embedding.weight", *(() if config.tied_embeddings else ("embedding.weight",))}
    return sum(size * _chosen(name, config) for name, size in sizes.items() if name not in is_looked_up)


def head_bytes(head: HeadFacts, target: CheckpointFacts, quant: QuantOptions | None) -> float:
    """Of a guess of a head; where it has no vocabulary matrix of its own, with the target's."""
    sizes = _sizes(Weights(head.weights), quant)
    own = sum(size for name, size in sizes.items() if name not in _LOOKED_UP)
    if any(name.endswith("lm_head.weight") for name in sizes):
        return own
    if sizes.keys() & {"embedding.weight"} and not head.cache_bytes_per_1k:  # an assistant's vocabulary matrix
        return own + sizes["embedding.weight"]
    return own + vocabulary_bytes(target, None)


def vocabulary_bytes(facts: CheckpointFacts, quant: QuantOptions | None) -> int:
    """Of the matrix that makes logits."""
    sizes = _sizes(facts.weights, quant)
    return next(sizes[name] for name in _VOCABULARY_MATRICES if name in sizes)


def parameter_bytes(parameters: float, quant: QuantOptions | None) -> float:
    """Of a published head, whose files are not here: two bytes a value, or what quantising leaves."""
    return parameters * (2.0 if quant is None else quant.bits / 8 + 2 / quant.group)


def _sizes(weights: Weights | Mapping[str, AnyTensor], quant: QuantOptions | None) -> dict[str, int]:
    own = weights if isinstance(weights, Weights) else Weights(weights)
    schemes = {} if quant is None else schemes_for(own, quant)
    facts = {name: own.facts(name) for name in own}
    return {name: schemes[name].nbytes(fact.shape) if name in schemes else fact.nbytes for name, fact in facts.items()}


def _chosen(name: str, config: ModelConfig) -> float:
    match = _EXPERT.match(name)
    mlp = config.layers[int(match[1])].mlp if match is not None else None
    return mlp.routing.num_chosen / mlp.routing.num_experts if isinstance(mlp, ExpertMLP) else 1.0

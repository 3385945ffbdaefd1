"""One OpenVINO model per network, compiled with every precision property set by us."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import openvino as ov
from openvino import opset13 as ops

from paceline.models.config import ModelConfig, WeightType
from paceline.runtimes.base import FloatArray
from paceline.runtimes.decoder import decoder
from paceline.runtimes.openvino.blocks import OpenVINOBlocks
from paceline.runtimes.openvino.weights import GraphWeights


@dataclass(frozen=True, slots=True)
class Graph:
    """A compiled network.

    Attributes:
        inputs: index of each named input.
        digest: of its nodes and outputs; two graphs with the same digest are the same function of their inputs.
    """

    compiled: ov.CompiledModel
    inputs: dict[str, int]
    digest: str


def build_graph(config: ModelConfig, weights: GraphWeights, collect_layers: Sequence[int], num_threads: int) -> Graph:
    """Compile the canonical graph: logits and final hidden states always, boundaries of `collect_layers` behind them.

    Which outputs a graph returns can change its bits in bf16, so a target has these two whichever drafter is used.
    """
    blocks = OpenVINOBlocks(config, weights)
    logits, hidden, collected = decoder(blocks, config, collect_layers)
    outputs = [logits, hidden, *collected]
    model = ov.Model([ops.result(output) for output in outputs], list(blocks.parameters.values()), f"{config.family}-decoder")
    compiled = ov.Core().compile_model(model, "CPU", compile_properties(weights.weight_type, num_threads, weights.smallest_group))
    outputs_of_nodes = [(node.get_type_name(), node.output(0)) for node in model.get_ordered_ops() if node.get_output_size()]
    nodes = [(kind, str(output.get_partial_shape()), str(output.get_element_type())) for kind, output in outputs_of_nodes]
    digest = hashlib.sha256(repr((nodes, len(outputs))).encode()).hexdigest()
    return Graph(compiled, {name: index for index, name in enumerate(blocks.parameters)}, digest)


def build_lm_head(head: FloatArray, weight_type: WeightType, num_threads: int) -> ov.CompiledModel:
    """A graph of the vocabulary projection `head` [V, E] alone: hidden states [T, E] to logits [T, V]."""
    hidden = ops.parameter(ov.PartialShape([-1, head.shape[1]]), ov.Type.f32)
    matrix = ops.constant(head)
    model = ov.Model([ops.matmul(hidden, matrix, False, True)], [hidden], "lm-head")
    return ov.Core().compile_model(model, "CPU", compile_properties(weight_type, num_threads))


def compile_properties(weight_type: WeightType, num_threads: int, activation_group: int = 0) -> dict[str, str]:
    """Plugin properties; left to its defaults it would keep 8-bit caches and run float32 models in bf16.

    Args:
        activation_group: activations in front of compressed matrices are quantised in groups of so many, where the processor
            has instructions for it; 0 = never. More than a matrix's own group makes products far slower.
    """
    return {
        "INFERENCE_PRECISION_HINT": weight_type.value,
        "KV_CACHE_PRECISION": weight_type.value,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(activation_group),
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": str(num_threads),
    }


def computable(stored: WeightType) -> WeightType:
    """The type this CPU computes weights of type `stored` in: bf16 only where it multiplies bf16 natively, else float32.

    float32 holds every f16 and bf16 value exactly; without native instructions the plugin's bf16 kernels are ten times slower.
    """
    if stored is WeightType.BF16 and "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        return WeightType.BF16
    return WeightType.F32

"""The families with mixtures of experts: their part of the table in `families.py`."""

from dataclasses import replace

from paceline.errors import CheckpointError, shortened
from paceline.models.family import Family
from paceline.models.layer_reader import LayerReader
from paceline.models.layers import ClampedSwiGLU, DenseMLP, ExpertMLP, LayerConfig, QKNorm, Routing, Scoring

Layers = tuple[LayerConfig, ...]


def _mixtral(read: LayerReader) -> Layers:
    experts = ExpertMLP(routing=replace(read.routing(), is_normalized=True), expert=read.mlp())
    return read.layers(read.attention(), experts, slides=[True] * read.num_layers)


def _olmoe(read: LayerReader) -> Layers:
    if read.fields.values.get("clip_qkv") is not None:
        raise CheckpointError(f"{read.fields.path}: clip_qkv = {shortened(read.fields.values['clip_qkv'])} is not supported, only null is")
    bias = read.flag("attention_bias")
    attention = read.attention(bias=bias, output_bias=bias, qk_norm=QKNorm.WIDTH)
    return read.layers(attention, ExpertMLP(routing=read.routing(), expert=read.mlp()))


def _qwen2_moe(read: LayerReader) -> Layers:
    experts = ExpertMLP(
        routing=read.routing(),
        expert=read.mlp(size="moe_intermediate_size"),
        shared=read.mlp(size="shared_expert_intermediate_size"),
        gates_shared=True,
    )
    is_listed = read.fields.values.get("layer_types") is not None
    last = read.fields.number("max_window_layers", 28)
    slides = [layer % 2 == 0 and layer < last for layer in range(read.num_layers)] if not is_listed else read.sliding_layers()
    attention = read.attention(bias=read.fields.flag("qkv_bias", default=True))
    return read.layers(attention, sparse_layers(read, experts), slides=slides if read.flag("use_sliding_window") else ())


def _qwen3_moe(read: LayerReader) -> Layers:
    bias, slides = read.flag("attention_bias"), read.flag("use_sliding_window")
    attention = read.attention(bias=bias, output_bias=bias, qk_norm=QKNorm.HEAD)
    experts = ExpertMLP(routing=read.routing(), expert=read.mlp(size="moe_intermediate_size"))
    return read.layers(attention, sparse_layers(read, experts), slides=[slides] * read.num_layers)


def sparse_layers(read: LayerReader, experts: ExpertMLP) -> list[DenseMLP | ExpertMLP]:
    """Experts in every `decoder_sparse_step`-th layer that is not among `mlp_only_layers`."""
    fields, step = read.fields, read.fields.size("decoder_sparse_step", 1)
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise CheckpointError(f"{fields.path}: mlp_only_layers = {shortened(dense)}, expected a list of layers")
    has_experts = [layer not in dense and (layer + 1) % step == 0 for layer in range(read.num_layers)]
    return [experts if chooses else read.mlp() for chooses in has_experts]


def grouped_routing(read: LayerReader) -> Routing:
    """DeepSeek-V3's: experts in groups, compared with a correction.

    Raises:
        CheckpointError: the groups do not divide the experts, or hold too few.
    """
    fields, routing = read.fields, read.routing()
    groups, chosen_groups = fields.size("n_group", 1), fields.size("topk_group", 1)
    if routing.num_experts % groups or chosen_groups > groups or routing.num_chosen > routing.num_experts // groups * chosen_groups:
        raise CheckpointError(
            f"{fields.path}: {routing.num_experts} experts in n_group = {groups} groups, of which topk_group = {chosen_groups} are chosen, "
            f"cannot give num_experts_per_tok = {routing.num_chosen}"
        )
    return replace(
        routing, scoring=Scoring.SIGMOID, least=1e-20 if routing.is_normalized else 0.0, factor=fields.number("routed_scaling_factor", 1.0),
        num_groups=groups, chosen_groups=chosen_groups, is_corrected=True,
    )  # fmt: skip


def _glm4_moe(read: LayerReader) -> Layers:
    fields, routing = read.fields, grouped_routing(read)
    expert, num_shared = read.mlp(size="moe_intermediate_size"), fields.number("n_shared_experts", 1)
    shared = replace(expert, intermediate_size=int(expert.intermediate_size * num_shared)) if num_shared else None
    num_dense = fields.size("first_k_dense_replace", 1, least=0, most=read.num_layers)
    experts = ExpertMLP(routing=routing, expert=expert, shared=shared)
    mlps = [read.mlp() if layer < num_dense else experts for layer in range(read.num_layers)]
    attention = read.attention(bias=read.flag("attention_bias"), qk_norm=QKNorm.HEAD if read.flag("use_qk_norm") else QKNorm.NONE)
    return read.layers(attention, mlps)


def _gpt_oss(read: LayerReader) -> Layers:
    fields = read.fields
    if not any(fields.values.get(name) for name in ("rope_parameters", "rope_scaling")):
        raise CheckpointError(f"{fields.path} has no 'rope_scaling', which a gpt_oss needs")
    bias = fields.flag("attention_bias", default=True)
    activation = ClampedSwiGLU(fields.positive("swiglu_alpha"), fields.positive("swiglu_limit"))
    expert = DenseMLP(intermediate_size=fields.size("intermediate_size"), activation=activation, bias=True)
    experts = ExpertMLP(
        routing=replace(read.routing(chosen=("num_experts_per_tok", "experts_per_token")), is_normalized=True, bias=True), expert=expert
    )
    attention = read.attention(bias=bias, output_bias=bias, has_sinks=True)
    return read.layers(attention, experts, slides=read.sliding_layers(2))


_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096}
EXPERTS = (
    Family(
        name="mixtral",
        architecture="MixtralForCausalLM",
        layers=_mixtral,  # its GGUF files say llama
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    Family(
        name="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        gguf="qwen2moe",
        layers=_qwen2_moe,
        defaults={
            **_QWEN,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    Family(
        name="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        gguf="qwen3moe",
        layers=_qwen3_moe,
        defaults={**_QWEN, "num_key_value_heads": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    Family(
        name="olmoe",
        architecture="OlmoeForCausalLM",
        gguf="olmoe",
        layers=_olmoe,
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "eos_token_id": 50279,
        },
    ),
    Family(
        name="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        gguf="glm4moe",
        layers=_glm4_moe,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": True,
        },
        rotates_partially=True,
        part_names={"shared_expert": "mlp.shared_experts"},
    ),
    Family(
        name="gpt_oss",
        architecture="GptOssForCausalLM",
        gguf="gpt-oss",
        layers=_gpt_oss,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        part_names={"router": "mlp.router"},
        packs_experts=True,
    ),
)

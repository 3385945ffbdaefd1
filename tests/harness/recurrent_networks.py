"""Small networks with recurrent layers, made without a checkpoint."""

from dataclasses import replace

import numpy as np

from harness.model_configs import make_config
from paceline.models.config import ModelConfig, WeightType
from paceline.models.layers import GatedDeltaConfig, GatedNorm, LayerConfig, Mamba2Config, Recurrent, ShortConvConfig
from paceline.models.tensor_names import tensor_shapes
from paceline.models.weights import AnyTensor, Tensor

MIXERS: dict[str, Recurrent] = {
    "delta": GatedDeltaConfig(num_key_heads=2, num_value_heads=4, key_size=16, value_size=32, kernel_size=4),
    "narrow delta": GatedDeltaConfig(
        num_key_heads=1,
        num_value_heads=3,
        key_size=8,
        value_size=24,
        kernel_size=2,
        beta_scale=2.0,
        has_separate_qkv_projections=True,
        norm_eps=0.1,
    ),
    "wide delta": GatedDeltaConfig(num_key_heads=1, num_value_heads=2, key_size=48, value_size=64, kernel_size=4),
    "mamba": Mamba2Config(num_heads=6, head_size=16, num_groups=2, state_size=24, kernel_size=4),
    "narrow mamba": Mamba2Config(
        num_heads=2,
        head_size=8,
        num_groups=1,
        state_size=5,
        kernel_size=3,
        norm=GatedNorm.BEFORE_GATE,
        norm_groups=2,
        conv_bias=False,
        bias=True,
        dt_limits=(0.05, 0.8),
        gate_scale=0.7,
        dt_scale=1.5,
        output_scale=0.6,
    ),
    "convolution": ShortConvConfig(channels=64, kernel_size=3),
    "biased convolution": ShortConvConfig(channels=64, kernel_size=5, bias=True),
}


_UNNORMED_MAMBA = Mamba2Config(num_heads=3, head_size=16, num_groups=1, state_size=8, kernel_size=4, norm=GatedNorm.NONE)


def recurrent_config(*mixers: Recurrent | None) -> ModelConfig:
    """A layer for each mixer; None = attention, and a mixer next to it if there are several others."""
    config = make_config(num_layers=1)
    attention = config.layers[0]
    if len(mixers) > 2:
        attention = replace(attention, parallel_mixer=_UNNORMED_MAMBA)
    layers = [attention if mixer is None else LayerConfig(mixer=mixer, mlp=attention.mlp) for mixer in mixers]
    return replace(config, layers=tuple(layers))


def recurrent_weights(config: ModelConfig, seed: int) -> dict[str, AnyTensor]:
    """Random ones, with decays from nearly all to nearly nothing."""
    random, tensors = np.random.default_rng(seed), dict[str, AnyTensor]()
    for name, shape in tensor_shapes(config).items():
        array = (0.3 * random.normal(size=shape)).astype(np.float32)
        if name.endswith("decay.weight"):
            array = -np.exp(random.uniform(-4, 1, shape)).astype(np.float32)
        elif name.endswith("decay.bias"):
            array = random.uniform(-6, 2, shape).astype(np.float32)
        elif "norm" in name:
            array += np.float32(1)
        tensors[name] = Tensor(array, WeightType.F32, array.shape)
    return tensors

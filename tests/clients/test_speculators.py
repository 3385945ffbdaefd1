"""Heads written by the speculators library, compared with its own classes, in a separate environment (make test-clients)."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from clients.run_foreign import run_foreign
from harness.model_configs import make_config, map_attention
from harness.native_network import plain_tensor
from paceline.drafters.eagle.checkpoint import open_eagle_checkpoint
from paceline.drafters.eagle.config import EagleConfig, read_eagle_config
from paceline.drafters.eagle.network import open_eagle_head
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.mtp import load_mtp, open_mtp_head
from paceline.drafters.recurrent_heads.cache import TargetFeaturePairs
from paceline.drafters.recurrent_heads.head import DraftFeaturePairs, RecurrentHead
from paceline.models.config import WeightType
from paceline.models.layers import QKNorm
from paceline.models.rope_config import RopeConfig
from paceline.models.weights import Weights
from paceline.runtimes import load as load_module
from paceline.runtimes.base import RowRange

VOCAB_SIZE, HIDDEN, MAX_POSITIONS = 97, 32, 64
TOLERANCE, VISIBLE = 1e-4, 0.05  # of log-probabilities
DRAFT_IDS = list(range(4, 94, 3))
TABLE = np.array([3, 1, 2], np.int32)
LAYER = {
    "model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
}  # fmt: skip
EAGLE3 = {"draft_vocab_size": len(DRAFT_IDS), "eagle_aux_hidden_state_layer_ids": [2, 4, 6]}
WHOLE = {"draft_vocab_size": VOCAB_SIZE}
PEAGLE = {**EAGLE3, **WHOLE, "mask_token_id": 5}
TARGET = make_config(
    family="llama", vocab_size=VOCAB_SIZE, hidden_size=HIDDEN, intermediate_size=48, num_layers=9, num_heads=4, num_kv_heads=2,
    head_size=8, norm_eps=1e-5, max_positions=512, rope=RopeConfig(theta=1e6), weight_type=WeightType.F32,
)  # fmt: skip
Floats = NDArray[np.float32]
Ignore = Callable[[EagleConfig], EagleConfig]


@dataclass(frozen=True)
class Case:
    """A head to be made.

    Attributes:
        layer, config: changed in the library's configs.
        draft_ids: of its vocabulary; None = the target's.
        ignore: how a head would be read that overlooks the switch.
        zeroed: what the names of tensors end with that such a head would overlook.
        steps: that can be compared: with a window the library's training does not move it along with drafted pairs.
    """

    kind: str = "eagle3"
    layer: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    draft_ids: list[int] | None = field(default_factory=lambda: DRAFT_IDS)
    ignore: Ignore | None = None
    zeroed: str | None = None
    steps: int = 3


def switched(**changes: Any) -> Ignore:
    return lambda config: replace(config, **changes)


def layers_switched(**changes: Any) -> Ignore:
    return lambda config: replace(config, layers=replace(config.layers, **changes))


def first_layers(count: int) -> Ignore:
    return lambda config: replace(config, layers=replace(config.layers, layers=config.layers.layers[:count]))


def attention_switched(**changes: Any) -> Ignore:
    return lambda config: replace(config, layers=map_attention(config.layers, **changes))


def rope(rope_type: str, **more: Any) -> dict[str, Any]:
    return {
        "layer": {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4, **more}},
        "ignore": attention_switched(rope=RopeConfig(1e4)),
    }


WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "num_hidden_layers": 2}
FULL = attention_switched(window=None)
LONGROPE = {
    "original_max_position_embeddings": 512,
    "short_factor": [1.5, 2.0, 3.0, 4.0],
    "long_factor": [2.0, 4.0, 8.0, 9.0],
    "factor": 4.0,
}
CASES = {
    "eagle3": Case(),
    "eagle3, norm_before_residual": Case(config={"norm_before_residual": True}, ignore=switched(norm_before_residual=False)),
    "eagle3, norm_before_fc": Case(config={"norm_before_fc": True}, ignore=switched(has_concat_norm=False)),
    "eagle3, fc_norm": Case(config={"fc_norm": True}, ignore=switched(has_boundary_norms=False)),
    "eagle3, norm_output": Case(config={"norm_output": True}, ignore=switched(normed_recurrence=False)),
    "eagle3, every norm": Case(
        config={"norm_before_residual": True, "fc_norm": True, "norm_output": True}, ignore=switched(norm_before_residual=False)
    ),
    "eagle3, whole vocabulary": Case(config=WHOLE, draft_ids=None),
    "eagle3, two boundaries": Case(config={"eagle_aux_hidden_state_layer_ids": [1, 7]}),
    "eagle3, three layers": Case(layer={"num_hidden_layers": 3}, ignore=first_layers(2)),
    "eagle3, heads of 12 values": Case(layer={"head_dim": 12}),
    "eagle3, one key head": Case(layer={"num_key_value_heads": 1}),
    "eagle3, qwen3": Case(layer={"model_type": "qwen3", "num_hidden_layers": 2}, ignore=attention_switched(qk_norm=QKNorm.NONE)),
    "eagle3, biases of the attention": Case(layer={"attention_bias": True, "num_hidden_layers": 2}, zeroed="self_attn.q_proj.bias"),
    "eagle3, biases of the MLP": Case(layer={"mlp_bias": True}, zeroed="mlp.down_proj.bias"),
    "eagle3, hidden_act": Case(layer={"hidden_act": "gelu_pytorch_tanh"}),
    "eagle3, rms_norm_eps": Case(layer={"rms_norm_eps": 0.5}, ignore=layers_switched(norm_eps=1e-5)),
    "eagle3, rope_theta": Case(**rope("default") | {"layer": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}}),
    "eagle3, rope linear": Case(**rope("linear", factor=4.0)),
    "eagle3, rope llama3": Case(
        **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
    ),
    "eagle3, rope yarn": Case(**rope("yarn", factor=8.0, original_max_position_embeddings=32)),
    "eagle3, rope longrope": Case(**rope("longrope", **LONGROPE)),
    "eagle3, half of a head rotates": Case(**rope("linear", factor=1.0, partial_rotary_factor=0.5)),
    "eagle3, a part that is overlooked": Case(layer={"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "eagle3, a window": Case(layer=WINDOW, ignore=FULL, steps=1),
    "eagle3, qwen3 with a window": Case(layer={**WINDOW, "model_type": "qwen3", "use_sliding_window": True}, ignore=FULL, steps=1),
    "peagle": Case("peagle", config=PEAGLE, draft_ids=None),
    "peagle, few tokens": Case("peagle", config={**PEAGLE, **EAGLE3}),
    "peagle, norm_before_fc": Case(
        "peagle", config={**PEAGLE, "norm_before_fc": True}, draft_ids=None, ignore=switched(has_concat_norm=False)
    ),
    "peagle, fc_norm": Case("peagle", config={**PEAGLE, "fc_norm": True}, draft_ids=None, ignore=switched(has_boundary_norms=False)),
    "peagle, norm_before_residual": Case(
        "peagle", config={**PEAGLE, "norm_before_residual": True}, draft_ids=None, ignore=switched(norm_before_residual=False)
    ),
    "peagle, qwen3": Case(
        "peagle", {"model_type": "qwen3", "num_hidden_layers": 2}, PEAGLE, draft_ids=None, ignore=attention_switched(qk_norm=QKNorm.NONE)
    ),
    "peagle, four layers": Case("peagle", {"num_hidden_layers": 4}, PEAGLE, draft_ids=None, ignore=first_layers(3)),
    "peagle, a window": Case("peagle", WINDOW, PEAGLE, draft_ids=None, ignore=FULL),
    "mtp": Case("mtp", {"model_type": "qwen3"}, draft_ids=None, zeroed="k_norm.weight"),
    "mtp, rope_theta": Case(
        "mtp", {"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}, draft_ids=None,
        zeroed="token_layernorm.weight",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def heads(clients: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a head for each case, and what the library makes of its inputs."""
    folder = tmp_path_factory.mktemp("speculators")
    cases = {name: {**asdict(case), "seed": seed, **_whole(case)} for seed, (name, case) in enumerate(CASES.items())}
    kept = ("kind", "seed", "layer", "config", "draft_ids")
    values = {name: {key: case[key] for key in kept} for name, case in cases.items()}
    (folder / "cases.json").write_text(json.dumps(values), encoding="utf-8")
    run_foreign(clients / "speculators", "speculators_heads.py", folder / "cases.json", folder)
    return folder


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_speculators_heads_compute_what_the_library_classes_do(
    name: str, backend: str, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: "Counter[str]"
) -> None:
    """Log-probabilities and drafts of true pairs and of those after them; a head that overlooks the switch would show."""
    if backend == "torch":
        monkeypatch.setattr(load_module, "kernels_path", lambda: None)
    case, given = CASES[name], np.load(heads / f"{name}.npz")
    expected = log_probs(given["logits"])[: case.steps]
    found = log_probs(outputs(case, heads / name, given))
    is_known = np.isfinite(found).all(-1)
    assert is_known.sum() >= expected.shape[0] * (expected.shape[1] - 2)
    assert np.abs(found - expected)[is_known].max() <= TOLERANCE
    same = found.argmax(-1)[is_known] == expected.argmax(-1)[is_known]
    assert same.all()
    tally["drafts that are those of the speculators library"] += int(same.sum())
    if case.ignore is not None or case.zeroed is not None:
        overlooked = log_probs(outputs(case, _without(case, heads / name, tmp_path), given, case.ignore))
        assert np.abs(overlooked - expected)[is_known].max() > VISIBLE


def outputs(case: Case, folder: Path, given: Mapping[str, NDArray[Any]], ignore: Ignore | None = None) -> Floats:
    """Our logits [steps, pairs, V]; NaN where a true token would be needed that there is not."""
    files = HeadFiles.open(folder)
    token_ids, features = given["token_ids"].astype(np.int32), given["features"]
    if case.kind == "mtp":
        return _of_mtp(files, token_ids, features, given)
    config = read_eagle_config(files, TARGET)
    checkpoint = open_eagle_checkpoint(files, config, TARGET)
    checkpoint = checkpoint if ignore is None else replace(checkpoint, config=ignore(config))
    head = open_eagle_head(checkpoint, TARGET, Weights({}), num_threads=2, max_model_len=MAX_POSITIONS)
    if case.draft_ids is None:
        assert head.target_ids is None
    else:
        assert head.target_ids is not None
        assert head.target_ids.tolist() == case.draft_ids
    head.runtime.allocate_kv(4)
    return _of_peagle(head, token_ids, features) if case.kind == "peagle" else _of_eagle3(head, token_ids, features, case.steps)


def _of_eagle3(head: RecurrentHead, token_ids: NDArray[np.int32], features: Floats, steps: int) -> Floats:
    """All true pairs in one pass, and then after each of them, the last one first, a chain of those that follow in the text."""
    count = len(token_ids)
    true = head.run_target_feature_pairs([_pairs(token_ids, features)], needs_logits=True, needs_all_logits=True)
    logits = np.full((steps, *true.logits.shape), np.nan, np.float32)
    logits[0], first = true.logits, true.features.copy()
    for pair in reversed(range(count)):
        feature = first[pair]
        for step in range(1, min(steps, count - pair)):
            place = pair + step
            rows = RowRange(0, 1, place + 1, TABLE, None, 1)
            result = head.run_draft_feature_pairs([DraftFeaturePairs([int(token_ids[place])], feature[None], [place], rows, [0])])
            logits[step, pair], feature = result.logits[0], result.features[0].copy()
    return logits


def _of_peagle(head: RecurrentHead, token_ids: NDArray[np.int32], features: Floats) -> Floats:
    """The last pair of each beginning of the text, with two masked ones after it."""
    count = len(token_ids)
    logits = np.full((3, count, head.config.layers.vocab_size), np.nan, np.float32)
    for end in range(1, count + 1):
        num_masked = 2 if end <= count - 3 else 0
        logits[: num_masked + 1, end - 1] = head.run_target_feature_pairs(
            [_pairs(token_ids[:end], features[:end])], needs_logits=True, num_masked=[num_masked]
        ).logits
    return logits


def _of_mtp(files: HeadFiles, token_ids: NDArray[np.int32], features: Floats, given: Mapping[str, NDArray[Any]]) -> Floats:
    """Pass after pass over all pairs, the outputs of one the features of the next, as the module is trained."""
    weights = Weights({f"{name}.weight": plain_tensor(given[name]) for name in ("embedding", "lm_head")})
    head = open_mtp_head(load_mtp(files, TARGET, weights), num_threads=2, max_model_len=MAX_POSITIONS)
    head.runtime.allocate_kv(4)
    steps, count = given["logits"].shape[:2]
    logits = []
    for step in range(steps):
        result = head.run_target_feature_pairs(
            [_pairs(token_ids[step + 1 :][:count], features[:count])], needs_logits=True, needs_all_logits=True
        )
        logits.append(result.logits.copy())
        features = result.features.copy()
    return np.stack(logits)


def _pairs(token_ids: NDArray[np.int32], features: Floats) -> TargetFeaturePairs:
    """All pairs of a text; slot 0 is never seen."""
    return TargetFeaturePairs(token_ids, features, RowRange(0, len(token_ids), 1, TABLE, None, 1))


def _without(case: Case, folder: Path, place: Path) -> Path:
    """The head without the tensors that a case names."""
    if case.zeroed is None:
        return folder
    tensors = load_file(folder / "model.safetensors")
    named = [name for name in tensors if name.endswith(case.zeroed)]
    assert named
    save_file(tensors | {name: np.zeros_like(tensors[name]) for name in named}, place / "model.safetensors")
    (place / "config.json").write_bytes((folder / "config.json").read_bytes())
    return place


def _whole(case: Case) -> dict[str, Any]:
    return {"layer": {**LAYER, **case.layer}, "config": {} if case.kind == "mtp" else {**EAGLE3, **case.config}}


def log_probs(logits: Floats) -> Floats:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)), np.float32)

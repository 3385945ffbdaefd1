"""Files of heads: found under many names, read without running code, and distinguished."""

import json
import pickle
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from harness.model_configs import make_config
from paceline.drafters.head_files import HeadFiles, check_target_sizes, is_head_file, strip_prefixes
from paceline.drafters.head_kinds import MEDUSA_AND_HYDRA_FILE_NAMES, HeadKind
from paceline.errors import BackendUnavailableError, CheckpointError, IncompatibleDrafterError
from paceline.models.config import WeightType
from paceline.models.rope_config import RopeConfig

Shapes = Mapping[str, tuple[int, ...]]
EAGLE = {"fc.weight": (8, 16), "layers.0.self_attn.q_proj.weight": (8, 8)}
EAGLE3 = {"fc.weight": (8, 24), "layers.0.self_attn.q_proj.weight": (8, 16)}


def tensors(shapes: Shapes, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.arange(int(np.prod(shape))).reshape(shape).to(dtype) for name, shape in shapes.items()}


def write(directory: Path, shapes: Shapes, config: Mapping[str, Any] | None = None, file: str = "model.safetensors") -> Path:
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if file.endswith(".safetensors"):
        save_file(tensors(shapes), directory / file)
    else:
        torch.save(tensors(shapes), directory / file)
    return directory


KINDS: list[tuple[HeadKind, Shapes, dict[str, Any], str]] = [
    (HeadKind.EAGLE3, {"layers.0.x": (1,)}, {"speculators_model_type": "eagle3", "architectures": ["X"]}, "model.safetensors"),
    (HeadKind.MTP, {"mtp_layers.0.x": (1,)}, {"speculators_model_type": "mtp"}, "model.safetensors"),
    (HeadKind.DSPARK, EAGLE, {"speculators_model_type": "dspark"}, "model.safetensors"),
    (HeadKind.DFLASH2, EAGLE, {"speculators_model_type": "dflash2", "architectures": ["DFlash2DraftModel"]}, "model.safetensors"),
    (HeadKind.XPRESS, EAGLE, {"speculators_model_type": "xpress"}, "model.safetensors"),
    (HeadKind.MLP, EAGLE, {"speculators_model_type": "mlp"}, "model.safetensors"),
    (HeadKind.PEAGLE, EAGLE, {"speculators_model_type": "peagle"}, "model.safetensors"),
    (HeadKind.LANGUAGE_MODEL, {"model.norm.weight": (8,)}, {"speculators_model_type": "independent"}, "model.safetensors"),
    (HeadKind.PEAGLE, EAGLE3, {"architectures": ["PEagleDraftModel"]}, "model.safetensors"),
    (HeadKind.PEAGLE, {**EAGLE3, "mask_hidden": (1, 24)}, {"architectures": ["LlamaForCausalLMEagle3"]}, "model.safetensors"),
    (HeadKind.PEAGLE, EAGLE3, {"architectures": ["LlamaForCausalLMEagle3"], "parallel_drafting": True}, "pytorch_model.bin"),
    (HeadKind.PEAGLE, EAGLE3, {"ptd_token_id": 7}, "model.safetensors"),
    (HeadKind.EAGLE3, EAGLE3, {"parallel_drafting": False}, "model.safetensors"),
    (HeadKind.LANGUAGE_MODEL, {"model.norm.weight": (8,)}, {"pard_token": 7}, "model.safetensors"),
    (HeadKind.PARD2, {"model.norm.weight": (8,)}, {"pard_token": 7, "spd_type": "pard2"}, "model.safetensors"),
    (HeadKind.DSPARK, EAGLE3, {"architectures": ["Qwen3DSparkModel"], "dflash_config": {}}, "model.safetensors"),
    (HeadKind.DSPARK, {**EAGLE3, "markov_w1": (9, 2)}, {"dflash_config": {}}, "model.safetensors"),
    (HeadKind.DFLASH2, EAGLE3, {"architectures": ["DFlash2DraftModel"]}, "model.safetensors"),
    (HeadKind.DOMINO, EAGLE3, {"architectures": ["DominoDraftModel"], "dflash_config": {}}, "model.safetensors"),
    (HeadKind.MLP, {"head.0.weight": (9, 8)}, {"architectures": ["MLPSpeculatorPreTrainedModel"]}, "model.safetensors"),
    (HeadKind.EAGLE3, {"x": (1,)}, {"architectures": ["LlamaForCausalLMEagle3"]}, "model.safetensors"),
    (HeadKind.EAGLE3, {"midlayer.hidden_norm.weight": (8,)}, {}, "pytorch_model.bin"),
    (HeadKind.EAGLE3, {"d2t": (4,)}, {}, "model.safetensors"),
    (HeadKind.EAGLE3, {"fc.weight": (8, 24)}, {}, "model.safetensors"),
    (HeadKind.EAGLE, EAGLE, {"architectures": ["LlamaForCausalLM"]}, "pytorch_model.bin"),
    (HeadKind.EAGLE, {f"module.model.{name}": shape for name, shape in EAGLE.items()}, {}, "weights.safetensors"),
    (HeadKind.EAGLE, {**EAGLE, "lm_head.weight": (9, 8)}, {}, "model.safetensors"),
    (HeadKind.EAGLE, {f"model.{name}": shape for name, shape in EAGLE.items()}, {"model_type": "eagle", "model": {}}, "pytorch_model.bin"),
    (HeadKind.EAGLE3, {"x": (1,)}, {"model_type": "eagle", "model": {"architectures": ["Eagle3LlamaForCausalLM"]}}, "model.safetensors"),
    (HeadKind.EAGLE, {"fusion_fc.weight": (8, 16), "transformer.self_attn.q_proj.weight": (8, 8)}, {}, "model.safetensors"),
    (HeadKind.MEDUSA, {"anything": (1,)}, {}, "medusa_lm_head.pt"),
    (HeadKind.MEDUSA, {"0.0.linear.weight": (8, 8)}, {}, "model.safetensors"),
    (HeadKind.MEDUSA, {"medusa_head.0.0.linear.weight": (8, 8), "model.norm.weight": (8,)}, {}, "model.safetensors"),
    (HeadKind.MEDUSA, {"blocks.0.layers.0.weight": (8, 8)}, {"model_type": "medusa"}, "model.safetensors"),
    (HeadKind.MEDUSA, {"lm_heads.0.weight": (9, 8)}, {}, "model.safetensors"),
    (HeadKind.HYDRA, {"anything": (1,)}, {}, "hydra_lm_head.pt"),
    (HeadKind.HYDRA, {"hydra_mlp.0.0.linear.weight": (8, 16)}, {}, "model.safetensors"),
    (HeadKind.DFLASH, {"fc.weight": (8, 40)}, {"architectures": ["DFlashDraftModel"]}, "model.safetensors"),
    (HeadKind.MTP, {"mtp.fc.weight": (8, 16), "model.norm.weight": (8,)}, {"num_hidden_layers": 3}, "model.safetensors"),
    (HeadKind.MTP, {"model.mtp_layers.0.input_proj.weight": (8, 16)}, {"model_type": "mimo"}, "model.safetensors"),
    (HeadKind.MTP, {"model.layers.3.eh_proj.weight": (8, 16)}, {"num_hidden_layers": 3}, "model.safetensors"),
    (HeadKind.LANGUAGE_MODEL, {"model.layers.3.eh_proj.weight": (8, 16)}, {"num_hidden_layers": 4}, "model.safetensors"),
    (HeadKind.LANGUAGE_MODEL, {"model.embed_tokens.weight": (9, 8)}, {"model_type": "llama"}, "model.safetensors"),
]


@pytest.mark.parametrize(("kind", "shapes", "config", "file"), KINDS)
def test_head_kind_is_detected_from_files_config_and_tensors(
    tmp_path: Path, kind: HeadKind, shapes: Shapes, config: dict[str, Any], file: str
) -> None:
    assert HeadFiles.open(write(tmp_path, shapes, config, file)).kind is kind


def test_method_specific_head_file_is_preferred_to_safetensors(tmp_path: Path) -> None:
    order = [*MEDUSA_AND_HYDRA_FILE_NAMES, "model.safetensors", "pytorch_model.bin", "x.safetensors"]
    for index, file in enumerate(order):
        write(tmp_path, {f"tensor{index}": (2,)}, file=file)
    for index, file in enumerate(order):
        if file != "x.safetensors":
            assert list(HeadFiles.open(tmp_path).tensors) == [f"tensor{index}"]
            (tmp_path / file).unlink()
    assert list(HeadFiles.open(tmp_path).tensors) == ["tensor5"]
    write(tmp_path, {"other": (2,)}, file="y.safetensors")
    with pytest.raises(CheckpointError, match=r"holds 2 \*\.safetensors files.*medusa_lm_head\.pt"):
        HeadFiles.open(tmp_path)


def test_head_may_be_a_single_file_without_config(tmp_path: Path) -> None:
    write(tmp_path, {"0.0.linear.weight": (8, 8)}, file="medusa_lm_head.pt")
    files = HeadFiles.open(tmp_path / "medusa_lm_head.pt")
    assert (files.kind, files.config, files.files) == (HeadKind.MEDUSA, {}, (tmp_path / "medusa_lm_head.pt",))
    assert is_head_file(str(tmp_path / "medusa_lm_head.pt"))
    assert not is_head_file(str(tmp_path))
    assert not is_head_file("owner/medusa.pt")


def test_training_prefixes_are_stripped_from_head_tensor_names(tmp_path: Path) -> None:
    assert strip_prefixes("module.ea_layer.fc.weight") == "fc.weight"
    assert strip_prefixes("draft_model.model.norm.weight") == "norm.weight"
    assert strip_prefixes("eagle_module.layers.0.x") == "layers.0.x"
    assert strip_prefixes("modules.x") == "modules.x"
    save_file({"model.norm.weight": torch.zeros(2), "norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert HeadFiles.open(tmp_path).weight("norm.weight").array.tolist() == [1.0, 1.0]  # the name that needs no stripping


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_safetensors_and_pytorch_heads_have_equal_values(tmp_path: Path, dtype: torch.dtype) -> None:
    content = {"w": torch.randn(3, 5).to(dtype), "ids": torch.tensor([3, 1]), "flags": torch.tensor([True, False])}
    save_file(content, tmp_path / "model.safetensors")
    torch.save(content, tmp_path / "pytorch_model.bin")
    one, other = HeadFiles.open(tmp_path / "model.safetensors"), HeadFiles.open(tmp_path / "pytorch_model.bin")
    weight_type = {torch.float32: WeightType.F32, torch.float16: WeightType.F16, torch.bfloat16: WeightType.BF16}[dtype]
    for files in (one, other):
        assert files.weight("w").weight_type is weight_type
        assert files.integer_vector("ids").tolist() == [3, 1]
        assert files.integer_vector("flags").tolist() == [1, 0]
        with pytest.raises(CheckpointError, match="'ids' is of type I64, supported are F32, F16, BF16"):
            files.weight("ids")
        with pytest.raises(CheckpointError, match="expected integers"):
            files.integer_vector("w")
    assert np.array_equal(one.weight("w").array, other.weight("w").array)


def test_sharded_head_files_are_joined(tmp_path: Path) -> None:
    for suffix, folder in ((".bin", "bin"), (".safetensors", "safe")):
        directory = tmp_path / folder
        directory.mkdir()
        stem = "pytorch_model" if suffix == ".bin" else "model"
        for index, name in enumerate(("a", "b")):
            write(directory, {name: (2,)}, file=f"{stem}-{index}{suffix}")
        weight_map = {"a": f"{stem}-0{suffix}", "b": f"{stem}-1{suffix}"}
        (directory / f"{stem}{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
        assert sorted(HeadFiles.open(directory).tensors) == ["a", "b"]
    index = tmp_path / "bin" / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../etc/passwd.bin"}}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"names .*/etc/passwd\.bin, expected \*\.bin files next to it"):
        HeadFiles.open(tmp_path / "bin")


class RunsWhenRead:
    """Leaves a trace if a file that holds it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.trace,))


@pytest.mark.parametrize("in_archive", [True, False])
def test_pickled_code_in_a_head_file_is_never_run(tmp_path: Path, in_archive: bool) -> None:
    trace, path = tmp_path / "trace", tmp_path / "pytorch_model.bin"
    if in_archive:
        torch.save({"w": RunsWhenRead(trace)}, path)
    else:
        path.write_bytes(pickle.dumps(RunsWhenRead(trace)))
    with pytest.raises(CheckpointError, match=r"cannot be read as a file of tensors") as caught:
        HeadFiles.open(tmp_path)
    assert not trace.exists()
    assert "weights_only" not in str(caught.value), "nobody is told how to run it"
    assert "trust" not in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("content", [{"w": torch.zeros(1), "step": 3}, [torch.zeros(1)], {"state_dict": {"w": torch.zeros(1)}}])
def test_training_checkpoint_is_refused_as_a_head(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="must hold only tensors by name"):
        HeadFiles.open(tmp_path)


def test_damaged_head_file_is_named_in_the_error(tmp_path: Path) -> None:
    write(tmp_path, {"w": (50, 50)}, file="pytorch_model.bin")
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be read"):
        HeadFiles.open(tmp_path)
    (tmp_path / "config.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json holds a JSON list"):
        HeadFiles.open(tmp_path)


def test_missing_and_misshapen_head_tensors_are_listed_in_one_error(tmp_path: Path) -> None:
    files = HeadFiles.open(write(tmp_path, {"a": (2, 3), "b": (4,), "extra": (1,), "rotary_emb.inv_freq": (4,)}, {}))
    files.check_shapes({"a": (2, 3)}, {"b": (4,), "absent": (9,)})
    with pytest.raises(CheckpointError) as caught:
        files.check_shapes({"a": (3, 2), "c": (5,), "d": (6, 7)}, {"b": (5,)})
    text = str(caught.value)
    assert "it lacks 2 tensors: c [5], d [6, 7]" in text
    assert "it holds 2 tensors: a [2, 3] instead of [3, 2], b [4] instead of [5]" in text
    with pytest.raises(CheckpointError, match=r"this target: it holds 1 tensor: b \[4\] instead of \[5\]"):
        files.check_shapes({"a": (2, 3)}, {"b": (5,)})


def test_unused_tensor_of_a_head_is_refused(tmp_path: Path) -> None:
    files = HeadFiles.open(write(tmp_path, {"a": (2, 3), "b": (4,), "extra": (1,), "rotary_emb.inv_freq": (4,)}, {}))
    files.check_all_used(["a", "b", "extra"])
    files.check_all_used(["a", "b"], ignored=lambda name: name == "extra")
    with pytest.raises(
        CheckpointError, match="holds 2 tensors: b, extra that no known draft_model head has: it may compute something else"
    ):
        files.check_all_used(["a"])


def test_head_of_an_unknown_speculators_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleDrafterError, match="speculators head of unknown type 'frobnicate'"):
        HeadFiles.open(write(tmp_path, EAGLE, {"speculators_model_type": "frobnicate"}))


def test_pytorch_head_without_torch_names_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, EAGLE, {}, file="pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BackendUnavailableError, match=r"pytorch_model\.bin is a PyTorch file.*pip install .*\[torch\]"):
        HeadFiles.open(tmp_path)


def test_head_with_the_hidden_size_of_another_model_is_refused(tmp_path: Path) -> None:
    files = HeadFiles.open(write(tmp_path, {"0.0.linear.weight": (8, 8)}, {}))
    rope = RopeConfig(theta=10000.0)
    target = make_config(vocab_size=32000, hidden_size=8, num_heads=1, num_kv_heads=1, head_size=8, max_positions=64, rope=rope)
    check_target_sizes(files, target, hidden_size=8, num_vocab_rows=32064)
    check_target_sizes(files, target, hidden_size=8)
    with pytest.raises(IncompatibleDrafterError, match="features of 16 values, the target's have 8"):
        check_target_sizes(files, target, hidden_size=16)
    with pytest.raises(IncompatibleDrafterError, match="has 128256 token ids, the target 32000"):
        check_target_sizes(files, target, hidden_size=8, num_vocab_rows=128256)


def test_refused_pickle_error_does_not_suggest_unsafe_loading(tmp_path: Path) -> None:
    for content in (Path("/etc/passwd"), {"a": Path("x")}, [print]):
        for is_zipped in (True, False):
            torch.save(content, tmp_path / "medusa_lm_head.pt", _use_new_zipfile_serialization=is_zipped)
            with pytest.raises(CheckpointError, match="objects or code of its own, which are never let run") as caught:
                HeadFiles.open(tmp_path)
            assert not re.search("weights_only|still be loaded|trust|add_safe_globals", str(caught.value))

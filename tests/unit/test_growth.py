"""A grown model is its source's function in more numbers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import grow
from growth import Growth, Sizes, check_sizes, plan_layers
from harness.checkpoints import VOCAB_SIZE, write_checkpoint

IDS = torch.randint(0, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1)).tolist()
# wider by no whole number, deeper, more heads of twice the size, more neurons
GROWN = Sizes(hidden=112, layers=7, heads=16, kv_heads=4, head=32, inner=250, vocab=VOCAB_SIZE)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source"), "llama")


@pytest.fixture(scope="module")
def grown(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("grown")
    grow.grow(source, out, GROWN, dtype="f32", seed=3, token_ids=IDS)
    return out


def logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([IDS])).logits[0]


def test_enlarged_model_keeps_the_source_logits_in_transformers(source: Path, grown: Path) -> None:
    wanted = logits(source)
    assert float((logits(grown) - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())
    config = json.loads((grown / "config.json").read_text(encoding="utf-8"))
    assert config["paceline_grown"] is True
    assert (grown / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    "changes", [{"hidden": 128}, {"layers": 6}, {"heads": 8}, {"kv_heads": 4}, {"inner": 97}, {}], ids=lambda one: "-".join(one) or "none"
)
def test_each_size_of_a_model_can_be_grown_alone(changes: dict[str, int], source: Path, tmp_path: Path) -> None:
    _, sizes = grow.read_config(source)
    wanted = Sizes(**({name: getattr(sizes, name) for name in sizes.__slots__} | {"heads": 8} | changes))
    assert grow.grow(source, tmp_path, wanted, dtype="f32", seed=0, token_ids=IDS) < 1e-5


def test_grown_model_matrices_are_dense_and_have_no_equal_rows(grown: Path) -> None:
    """What group quantisers see is what they see in trained models, also where a sublayer does nothing."""
    matrices = {name: tensor for name, tensor in load_file(grown / "model.safetensors").items() if tensor.dim() == 2}
    for name, tensor in matrices.items():
        groups = tensor[:, : tensor.shape[1] // 28 * 28].reshape(-1, 28)
        largest = groups.abs().amax(dim=1)
        assert float(largest.min()) > 0.02 * float(largest.median()), name
        unit = torch.nn.functional.normalize(tensor, dim=1)
        alike = (unit @ unit.T - torch.eye(len(unit))).abs().amax()
        assert float(alike) < 0.99, name


def test_plan_layers_uses_each_source_sublayer_once_in_order() -> None:
    for old, new in ((1, 1), (1, 4), (3, 7), (8, 16), (8, 17)):
        plans = plan_layers(old, new)
        assert len(plans) == new
        acts = [(plan.source, part) for plan in plans for part, is_live in (("a", plan.has_attention), ("m", plan.has_mlp)) if is_live]
        assert acts == [(layer, part) for layer in range(old) for part in "am"]


def test_grown_model_with_different_logits_is_not_written(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share = Growth._share
    monkeypatch.setattr(Growth, "_share", lambda *given, **options: share(*given, **options) * 1.01)
    with pytest.raises(SystemExit, match="nothing was written"):
        grow.grow(source, tmp_path, GROWN, dtype="f32", seed=0, token_ids=IDS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "value"), [("hidden", 32), ("layers", 2), ("head", 24), ("heads", 6), ("hidden", 100), ("vocab", 98)])
def test_impossible_grown_model_sizes_are_refused(name: str, value: int) -> None:
    old = Sizes(hidden=64, layers=3, heads=4, kv_heads=2, head=16, inner=96, vocab=97)
    values = {each: getattr(old, each) for each in old.__slots__} | {"kv_heads": 4, "heads": 8, name: value}
    with pytest.raises(ValueError, match=str(value)):
        check_sizes(old, Sizes(**values))


@pytest.mark.parametrize("parameters", [3e7, 1e8, 1e9, 4e9])
def test_sizes_for_returns_about_the_requested_parameters(parameters: float) -> None:
    _, mini = grow.read_config(grow.MINI)
    assert grow.sizes_for(parameters, mini).parameters == pytest.approx(parameters, rel=0.05)

"""Draft models are compared with transformers: start values, loss, gradients, hits and exported files; unsuitable targets are refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from harness.checkpoints import VOCAB_SIZE, write_checkpoint
from harness.gguf_checkpoints import write_gguf
from harness.model_configs import make_config
from harness.quick_profiles import quick_profiles
from paceline import LLM, SamplingParams
from paceline.errors import ConfigError
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.layers import Activation, NormOrder, QKNorm
from paceline.models.rope_config import RopeConfig, RopeType
from paceline.tokenizer.tokenizer import Tokenizer
from paceline.training.batches import Batch, make_batch
from paceline.training.draft_model import TrainableDraftModel
from paceline.training.drafter import TargetMatrices
from paceline.training.layers import FLATTENING
from paceline.training.run import WEIGHTS_FILE, export, train
from paceline.training.settings import TrainSettings
from paceline.training.vocabulary import DraftVocabulary

HIDDEN, LENGTHS, ANSWER_STARTS = 64, (11, 7, 9), (3, 2, 5)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3 rope": ("llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16}, "tie_word_embeddings": True}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
}


def make_model(directory: Path, num_layers: int, vocabulary_size: int = VOCAB_SIZE) -> TrainableDraftModel:
    """Return a draft model of a target, which computes in float32."""
    config, ids = read_model_config(directory), np.arange(vocabulary_size)
    settings = TrainSettings(drafter="draft-model", model=str(directory), num_layers=num_layers, max_prompt_tokens=16, max_answer_tokens=16)
    vocabulary = DraftVocabulary.from_ids(ids, VOCAB_SIZE)
    drafter = TrainableDraftModel(TargetMatrices(config, open_weights(directory, config)), vocabulary, settings.for_target(config))
    drafter.dtype = torch.float32
    return drafter


def make_texts(drafter: TrainableDraftModel) -> Batch:
    """Return a padded batch of random texts, the last tokens of which are answers."""
    rng = np.random.default_rng(3)
    data = SimpleNamespace(
        token_ids=[rng.integers(0, VOCAB_SIZE, length).astype(np.int32) for length in LENGTHS],
        is_answer=[np.arange(length) >= start for length, start in zip(LENGTHS, ANSWER_STARTS, strict=True)],
        features=lambda index: torch.from_numpy(rng.standard_normal((LENGTHS[index], HIDDEN))).bfloat16(),
    )
    return make_batch(data, range(len(LENGTHS)), drafter.vocabulary, HIDDEN, "cpu")  # type: ignore[arg-type]


def at_roots(values: Tensor, batch: Batch) -> Tensor:
    """Return the rows of [B, T, W] at the roots, in the order of the labels."""
    return torch.cat([values[row, batch.roots[row][batch.is_root[row]]] for row in range(len(values))])


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, values = TARGETS[request.param]
    return write_checkpoint(tmp_path / "target", family, **values)


def test_copy_of_all_layers_equals_the_target(target: Path) -> None:
    drafter = make_model(target, 3)
    batch = make_texts(drafter)
    with torch.no_grad():
        found = drafter.outputs(batch)[batch.is_root] @ drafter.lm_head.T / FLATTENING
        expected = at_roots(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)(batch.token_ids).logits, batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_start_values_of_a_gguf_file_equal_those_of_the_directory(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "target", "llama")  # the files differ in the order of the rows of q and k
    expected = make_model(directory, 2).state_dict()
    found = make_model(write_gguf(directory, tmp_path / "target.gguf"), 2).state_dict()
    assert list(found) == list(expected)
    for name, values in found.items():
        assert torch.equal(values, expected[name]), name


def as_transformers(drafter: TrainableDraftModel, directory: Path) -> Any:
    """Return the exported model in float32, with the values of the drafter that are not rounded."""
    directory.mkdir()
    export(drafter, directory, "target")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(dict(drafter.export("target")[1]), strict=False)
    assert (set(missing) <= {"lm_head.weight"}, unexpected) == (True, [])  # it is tied
    return model


def test_step_equals_eager_loss_and_gradients(target: Path, tmp_path: Path) -> None:
    size = VOCAB_SIZE - 20
    drafter = make_model(target, 2, size)
    batch, model = make_texts(drafter), as_transformers(drafter, tmp_path / "export")
    labels = torch.cat([batch.token_ids[row, start:length] for row, (start, length) in enumerate(zip(ANSWER_STARTS, LENGTHS, strict=True))])
    known = labels < size
    probs = (at_roots(batch.final.float(), batch) @ drafter.lm_head[:size].T).softmax(-1)
    for loss in ("soft", "hard"):
        drafter.settings = TrainSettings(drafter="draft-model", loss=loss)
        result = drafter.step(batch, torch.Generator())
        logs = at_roots(model(batch.token_ids).logits, batch)[:, :size].log_softmax(-1)
        rows = -(probs * logs).sum(-1) if loss == "soft" else -logs.gather(1, labels.clamp(max=size - 1)[:, None])[:, 0]
        expected = rows[known].sum() / len(labels)
        torch.testing.assert_close(result.loss, expected, rtol=1e-4, atol=1e-4)
        assert (result.num_hits, result.num_rows) == ([int((logs.argmax(-1) == labels)[known].sum())], [len(labels)])
        own, others = dict(drafter.named_parameters()), dict(model.named_parameters())
        found = torch.autograd.grad(result.loss, list(own.values()))
        for name, values, other in zip(own, found, torch.autograd.grad(expected, [others[f"model.{name}"] for name in own]), strict=True):
            torch.testing.assert_close(values, other, rtol=1e-3, atol=1e-5, msg=name)
        assert {name.removeprefix("model.") for name in others} - set(own) <= {"embed_tokens.weight", "lm_head.weight"}  # frozen


def test_hits_are_right_predictions_of_the_exported_model(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target", "llama")
    drafter = make_model(target, 2, VOCAB_SIZE - 20)  # ids outside the trained ones are drafted too
    batch = make_texts(drafter)
    model = as_transformers(drafter, tmp_path / "export")
    with torch.no_grad():
        for place in range(1, max(LENGTHS)):  # most tokens are those that the model predicts
            if place % 4:
                batch.token_ids[:, place] = model(batch.token_ids[:, :place]).logits[:, -1].argmax(-1)
        best = model(batch.token_ids).logits.argmax(-1)
    hits = drafter.hits(batch)
    assert 0 < int(hits.sum()) < hits.numel()
    for row, (start, length) in enumerate(zip(ANSWER_STARTS, LENGTHS, strict=True)):
        for index, root in enumerate(range(start - 1, length - 1)):
            for depth in range(drafter.depth):
                place = root + depth
                expected = place + 1 < length and best[row, place] == batch.token_ids[row, place + 1]
                assert hits[row, index, depth] == expected, (row, root, depth)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_exported_directory_is_an_ordinary_model(target: Path, dtype: str, bound: float, tmp_path: Path) -> None:
    drafter, directory = make_model(target, 2), tmp_path / "export"
    with torch.no_grad():  # as they are stored
        for values in (*drafter.parameters(), drafter.embedding, drafter.lm_head):
            values.copy_(values.bfloat16().float())
    directory.mkdir()
    export(drafter, directory, "target")
    Tokenizer.open(target).save(directory)
    if dtype == "float32":
        save_file({name: values.float() for name, values in load_file(directory / WEIGHTS_FILE).items()}, directory / WEIGHTS_FILE)
        config = (directory / "config.json").read_text(encoding="utf-8")
        (directory / "config.json").write_text(config.replace('"bfloat16"', '"float32"'), encoding="utf-8")
    model, batch = AutoModelForCausalLM.from_pretrained(directory), make_texts(drafter)
    assert model.dtype is getattr(torch, dtype)
    prompt = batch.token_ids[0, : LENGTHS[0]]
    with quick_profiles(), LLM(str(directory), drafter="none", threads=1, device="cpu") as llm:
        (output,) = llm.generate([prompt.tolist()], SamplingParams(max_tokens=4, ignore_eos=True, logprobs=5))
    with torch.no_grad():
        own = drafter.outputs(batch)[batch.is_root] @ drafter.lm_head.T
        logits = at_roots(model(batch.token_ids).logits, batch).float()
        logs = model(torch.cat([prompt, torch.tensor(output.token_ids)])[None]).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    assert float((own - logits).abs().max()) < 4 * bound * float(own.abs().max())
    assert output.token_ids[0] == int(logs[0].argmax())
    assert output.logprobs is not None
    for row, found in zip(logs, output.logprobs, strict=True):
        for token_id, logprob in found.top:
            assert logprob == pytest.approx(float(row[token_id]), abs=bound * float(row.abs().max()))
    text = "the cat sat on the mat"
    assert Tokenizer.open(directory).encode(text) == Tokenizer.open(target).encode(text)


UNSUITABLE: list[tuple[dict[str, Any], str]] = [
    ({"embedding_scale": 8.0}, "embedding_scale = 8.0"),
    ({"logit_scale": 0.5}, "logit_scale = 0.5"),
    ({"logit_soft_cap": 30.0}, "logit_soft_cap = 30.0"),
    ({"rope": RopeConfig(type=RopeType.YARN)}, "rope type yarn"),
    ({"rope": RopeConfig(rotated_fraction=0.5)}, "rotated_fraction = 0.5"),
    ({"norm_order": NormOrder.SANDWICH}, "norm_order = sandwich"),
    ({"attention": {"soft_cap": 50.0}}, "soft_cap = 50.0"),
    ({"attention": {"scale": 1.0}}, "scale = 1.0"),
    ({"attention": {"qk_norm": QKNorm.ALL_HEADS}}, "qk_norm = all_heads"),
    ({"attention": {"qk_norm": QKNorm.HEAD, "bias": True}}, "bias = True"),
    ({"attention": {"bias": True, "output_bias": True}}, "output_bias = True"),
    ({"attention": {"has_sinks": True}}, "has_sinks = True"),
    ({"mlp": {"activation": Activation.GELU_TANH}}, "activation = gelu_tanh"),
    ({"mlp": {"has_gate": False}}, "has_gate = False"),
    ({"num_layers": 1}, "num_layers is 2: use 1 to 1"),
]


@pytest.mark.parametrize(("values", "text"), UNSUITABLE, ids=[text for _, text in UNSUITABLE])
def test_unsuitable_target_is_refused_by_name(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        TrainableDraftModel.check_target(make_config(**{"num_layers": 3, **values}), TrainSettings(drafter="draft-model", num_layers=2))
    assert text in str(error.value)


@pytest.mark.parametrize(("family", "text"), [("gemma2", "embedding_scale"), ("qwen3_moe", "ExpertMLP")])
def test_training_refuses_an_unsuitable_target_before_writing_files(family: str, text: str, tmp_path: Path) -> None:
    target, output = write_checkpoint(tmp_path / "target", family), tmp_path / "drafter"
    with pytest.raises(ConfigError, match=text):
        train(TrainSettings(drafter="draft-model", model=str(target)), output, print)
    assert not output.exists()

"""Draft models whose vocabulary differs from their target's in a known way."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path


def reorder_vocabulary(source: Path, destination: Path, order: Sequence[int]) -> Path:
    """A copy of a checkpoint that computes the same under other ids: id i of the copy is id order[i] of the source.

    Ids of the source that are not in `order` are dropped.
    """
    shutil.copytree(source, destination, ignore=shutil.ignore_patterns("draft"))
    new_id = {old: new for new, old in enumerate(order)}
    path = destination / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    model = content["model"]
    model["vocab"] = {piece: new_id[old] for piece, old in model["vocab"].items() if old in new_id}
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if _is_possible(merge, model["vocab"])]
    content["added_tokens"] = [token | {"id": new_id[token["id"]]} for token in content["added_tokens"] if token["id"] in new_id]
    path.write_text(json.dumps(content), encoding="utf-8")
    _reorder_weights(destination / "model.safetensors", order)
    for name in ("config.json", "generation_config.json"):
        if (destination / name).is_file():
            _reorder_config(destination / name, new_id, len(order))
    return destination


def _is_possible(merge: str | list[str], vocab: dict[str, int]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return {left, right, left + right} <= vocab.keys()


def _reorder_config(path: Path, new_id: dict[int, int], vocab_size: int) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    if "vocab_size" in values:
        values["vocab_size"] = vocab_size
    for name in ("bos_token_id", "eos_token_id"):
        old = values.get(name)
        if isinstance(old, list):
            values[name] = [new_id[token] for token in old if token in new_id]
        elif old is not None:
            values[name] = new_id.get(old)
    path.write_text(json.dumps(values), encoding="utf-8")


def _reorder_weights(path: Path, order: Sequence[int]) -> None:
    from safetensors.torch import load_file, save_file

    matrices = ("model.embed_tokens.weight", "lm_head.weight")
    tensors = {name: tensor[list(order)] if name in matrices else tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path)

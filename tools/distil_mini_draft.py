"""Distil the embedded mini draft model from the mini target, on two CPU cores, in minutes.

Usage: python tools/distil_mini_draft.py TARGET_DIR DATA_DIR OUT_DIR [minutes] [--layers 1] [--ffn 960] [--pool FILE] [--evaluate]
TARGET_DIR holds the mini target and its heldout.jsonl, which is evaluated on and never trained on; DATA_DIR holds corpora/.
Pool: rows of 384 tokens, three in five written by the target after prompts from its training corpus (greedy, T = 0.7 or T = 1), the
rest corpus text, each with the target's final hidden states: its full law at a position then costs one matrix product.
Training: cross-entropy from the target's law, mixed with a little of its argmax, to the draft's. The embedding starts as the projection
of the target's that keeps most of the variance of its logits. --evaluate only measures what is in OUT_DIR.
"""

import argparse
import copy
import functools
import json
import math
import random
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

Tensor = torch.Tensor
Pool = tuple[Tensor, Tensor, Tensor]  # token ids [N, T], the target's final hidden states [N, T, E] in float16, prompt lengths [N]
HEADER = "<|im_start|>assistant\n"
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
ROW_LEN, GROUP, DRAFT_LEN, BATCH, PEAK_LR, ARGMAX_SHARE, PROMPT_WEIGHT = 384, 48, 4, 4, 3e-3, 0.4, 0.5
SHARES = {"chat": 0.32, "arithmetic": 0.18, "code-chat": 0.14, "code": 0.16, "json": 0.14, "book": 0.06}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        yield from map(json.loads, file)


def documents(data: Path) -> Iterator[tuple[str, str]]:
    """Yields (kind, text) of every document of the target's corpus, held-out ones included."""
    corpora = data / "corpora"
    for name in ("chat/sgd_train_turns.jsonl", "chat/taskmaster4_turns.jsonl"):
        for doc in read_lines(corpora / name):
            pairs = (("user" if who.lower() == "user" else "assistant", text) for who, _, text in (t.partition(": ") for t in doc["turns"]))
            yield "chat", SYSTEM + "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in pairs)
    answered = [("arithmetic", d["question"], d["answer"]) for d in read_lines(corpora / "instruct/gsm8k_train.jsonl")]
    codegen = json.loads((corpora / "instruct/gpteacher_codegen.json").read_text(encoding="utf-8"))
    answered += [("code-chat", d["instruction"] + ("\n" + d["input"] if d["input"] else ""), d["response"]) for d in codegen]
    for kind, question, answer in answered:
        yield kind, f"{SYSTEM}<|im_start|>user\n{question}<|im_end|>\n{HEADER}{answer}<|im_end|>\n"
    yield from (("code", doc["text"]) for doc in read_lines(corpora / "code/python.jsonl"))
    yield from (("json", json.dumps(doc, indent=1)[:12000]) for doc in read_lines(corpora / "json/mdn_bcd.jsonl"))
    yield "book", (corpora / "grimm_fairy_tales.txt").read_text(encoding="utf-8")
    yield from (("book", doc["text"].replace("\r", "")) for doc in read_lines(corpora / "books/children.jsonl"))


def cut_prompt(text: str, tokenizer: Tokenizer, rng: random.Random, limit: int) -> list[int]:
    """A prompt of at most limit tokens: a conversation up to an assistant header (none when all are too long), else a piece of text."""
    if text.startswith(SYSTEM):
        ends = [i + len(HEADER) for i in range(len(text)) if text.startswith(HEADER, i)]
        prompts = [tokenizer.encode(text[:end]).ids for end in (rng.choice(ends), ends[0])]
        return next((ids for ids in prompts if len(ids) <= limit), [])
    at = 0 if rng.random() < 0.6 else max(0, text.find("\n", rng.randrange(max(1, len(text) - 400))))
    return tokenizer.encode(text[at : at + 4 * limit]).ids[: rng.randrange(16, limit)]


def gumbel(*shape: int) -> Tensor:
    return -torch.empty(*shape).exponential_().clamp_min(1e-30).log()


@torch.no_grad()
def generate(
    target: LlamaForCausalLM, prompts: list[list[int]], heat: Tensor, row_len: int, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rows [B, T] that begin with the prompts and go on as the target does at temperatures heat [B], and its hidden states [B, T, E].

    noise [T, V] is used by every row when given, so that a draft can be sampled with the same.
    """
    lens, rows = torch.tensor([len(p) for p in prompts]), torch.tensor([(p + [0] * row_len)[:row_len] for p in prompts])
    at, cache, parts = int(lens.min()), DynamicCache(config=target.config), []
    new_ids = rows[:, :at]
    while True:  # a row with a longer prompt is fed its own tokens until they end
        parts.append(target.model(new_ids, past_key_values=cache).last_hidden_state)
        if at == row_len:
            return rows, torch.cat(parts, 1).half()
        logits = target.lm_head(parts[-1][:, -1])
        chosen = (logits + heat[:, None] * (gumbel(*logits.shape) if noise is None else noise[at])).argmax(-1)
        rows[:, at] = torch.where(lens > at, rows[:, at], chosen)
        new_ids, at = rows[:, at : at + 1], at + 1


@functools.cache
def load(directory: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def pool_rows(target_dir: Path, seed: int, group: list[list[int]]) -> Pool:
    """The pool's rows of one group, in a process of its own; full rows are corpus text, the others are continued."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rows, hidden = generate(load(target_dir), group, torch.tensor([0.0, 0.7, 1.0])[torch.randint(3, (len(group),))], ROW_LEN)
    return rows.short(), hidden, torch.tensor([len(ids) % ROW_LEN for ids in group])


def build_pool(target_dir: Path, data: Path, num_rows: int) -> Pool:
    """About num_rows rows: of each kind its share, three fifths continued by the target, the rest corpus text."""
    tokenizer, rng = Tokenizer.from_file(str(target_dir / "tokenizer.json")), random.Random(0)
    held = {doc["text"] for doc in read_lines(target_dir / "heldout.jsonl")}
    allowed = [doc for doc in documents(data) if doc[1][:8000] not in held]
    by_kind = {kind: [text for other, text in allowed if other == kind] for kind in SHARES}
    prompts: list[list[int]] = []
    for kind, share in SHARES.items():
        goal, stream = len(prompts) + int(share * num_rows), list[int]()
        while len(stream) < int(0.4 * share * num_rows) * ROW_LEN:
            text = rng.choice(by_kind[kind])
            at = rng.randrange(len(text)) if kind == "book" else 0
            stream += [*tokenizer.encode(text[at : at + 4000]).ids, 0]
        prompts += [stream[i : i + ROW_LEN] for i in range(0, len(stream) - ROW_LEN + 1, ROW_LEN)]
        while len(prompts) < goal:
            prompts += [ids] if (ids := cut_prompt(rng.choice(by_kind[kind]), tokenizer, rng, 208)) else []
    prompts.sort(key=len)
    groups = [prompts[i : i + GROUP] for i in range(0, len(prompts), GROUP)]
    begin, parts = time.time(), list[Pool]()
    with ProcessPoolExecutor(2, get_context("spawn")) as executor:
        for part in executor.map(pool_rows, [target_dir] * len(groups), range(len(groups)), groups):
            parts.append(part)
            print(f"pool {len(parts)}/{len(groups)} after {time.time() - begin:.0f} s", flush=True)
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]), torch.cat([part[2] for part in parts])


def new_draft(target: LlamaForCausalLM, hidden_states: Tensor, hidden_size: int, layers: int, ffn: int) -> LlamaForCausalLM:
    draft = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=target.config.vocab_size,
            hidden_size=hidden_size,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=2048,
            rope_theta=10000.0,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=[0, 2],
            initializer_range=0.05,
        )
    )
    draft.generation_config.eos_token_id, draft.generation_config.pad_token_id = [0, 2], 0
    sample = hidden_states[::8, ::8].float().flatten(0, 1)
    values, vectors = torch.linalg.eigh(sample.T @ sample / len(sample))
    with torch.no_grad():  # small, since at first a position's own token is nearly all the draft's last hidden state holds
        scaled = 0.2 * (target.lm_head.weight - target.lm_head.weight.mean(0)) @ (vectors * values.clamp_min(0).sqrt())
        spread, axes = torch.linalg.eigh(scaled.T @ scaled)
        draft.model.embed_tokens.weight.copy_(scaled @ axes[:, -hidden_size:])
    print(f"logit variance kept {spread[-hidden_size:].sum() / spread.sum():.4f}", flush=True)
    return draft


def save(draft: LlamaForCausalLM, target_dir: Path, out: Path) -> None:
    copy.deepcopy(draft).to(torch.bfloat16).save_pretrained(out)
    shutil.copyfile(target_dir / "tokenizer.json", out / "tokenizer.json")
    shutil.copyfile(target_dir / "tokenizer_config.json", out / "tokenizer_config.json")


def distil_loss(draft: LlamaForCausalLM, target: LlamaForCausalLM, rows: Pool) -> Tensor:
    """Mean over positions of the cross-entropy from the target's law, mixed with its argmax, to the draft's."""
    ids, hidden, prompt_lens = rows
    with torch.no_grad():
        law = target.lm_head(hidden.float())
        best = law.argmax(-1, keepdim=True)
        law = law.softmax(-1).mul_(1 - ARGMAX_SHARE).scatter_add_(-1, best, torch.full(best.shape, ARGMAX_SHARE))
        weight = torch.where(torch.arange(ROW_LEN) < prompt_lens[:, None] - 1, PROMPT_WEIGHT, 1.0)
    logits = draft(input_ids=ids.long(), use_cache=False).logits
    return ((logits.logsumexp(-1) - (law * logits).sum(-1)) * weight).sum() / weight.sum()


def train(draft: LlamaForCausalLM, target: LlamaForCausalLM, pool: Pool, minutes: float, save_to: tuple[Path, Path]) -> None:
    optimizer = torch.optim.AdamW(draft.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.02)
    begin, last_save, step, recent = time.time(), time.time(), 0, 0.0
    while (done := (time.time() - begin) / (60 * minutes)) < 1:
        rows = torch.randint(len(pool[0]), (BATCH,))
        optimizer.param_groups[0]["lr"] = PEAK_LR * min(1.0, (step + 1) / 40) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        loss = distil_loss(draft, target, (pool[0][rows], pool[1][rows], pool[2][rows]))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        step, recent = step + 1, 0.95 * recent + 0.05 * loss.item() if step else loss.item()
        if step % 20 == 0:
            print(f"step {step} tokens {step * BATCH * ROW_LEN / 1e6:.2f}M loss {recent:.4f} {time.time() - begin:.0f} s", flush=True)
        if time.time() - last_save > 180:
            save(draft, *save_to)
            last_save = time.time()
    save(draft, *save_to)


@torch.no_grad()
def chain_lengths(draft: LlamaForCausalLM, row: Tensor, at: int, noise: Tensor | None) -> list[int]:
    """Tokens emitted by each step of chain drafting along row from position at; noise [T, V] is what the target drew with."""
    emitted, cache, end = [], DynamicCache(config=draft.config), len(row)
    while at < end:
        cached, position = int(cache.get_seq_length()), at
        while position < min(at + DRAFT_LEN, end):  # the first wrong draft token ends the step: what follows it is never kept
            logits = draft.lm_head(draft.model(row[None, cached:position], past_key_values=cache).last_hidden_state[0, -1])
            if int((logits if noise is None else logits + noise[position]).argmax()) != row[position]:
                break
            cached, position = position, position + 1
        emitted.append(min(position + 1, end) - at)
        at = min(position + 1, end)
    return emitted


def evaluate(target_dir: Path, out: Path, num_prompts: int = 24, num_new: int = 80, limit: int = 224) -> None:
    """Prints mean acceptance lengths (emitted / steps after the prompt's) on held-out prompts of each kind."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    rng, tokenizer, target, draft = random.Random(1), Tokenizer.from_file(str(target_dir / "tokenizer.json")), load(target_dir), load(out)
    noise = gumbel(limit + num_new, target.config.vocab_size)
    for kind in ("chat", "arithmetic", "code", "json"):
        texts = [doc["text"] for doc in read_lines(target_dir / "heldout.jsonl") if doc["kind"].removesuffix("-chat") == kind]
        rng.shuffle(texts)  # few are JSON: each then gives several prompts, cut at different places
        candidates = (cut_prompt(texts[i % len(texts)], tokenizer, rng, limit) for i in range(1000))
        prompts = [ids for _, ids in zip(range(num_prompts), filter(None, candidates), strict=False)]
        rows, _ = generate(target, prompts * 2, torch.arange(2.0).repeat_interleave(num_prompts), limit + num_new, noise)
        lengths: tuple[list[int], ...] = ([], [], [])
        for i, row in enumerate(rows):
            start = len(prompts[i % num_prompts])
            stop = next((j + 1 for j in range(start, start + num_new) if row[j] in (0, 2)), start + num_new)
            for which, shared in ((1, None), (2, noise)) if i >= num_prompts else ((0, None),):
                lengths[which].extend(chain_lengths(draft, row[:stop], start + 1, shared))
        means = " / ".join(f"{sum(result) / len(result):.2f}" for result in lengths)
        print(f"{kind}: T=0 / T=1 greedy draft / T=1 shared noise: {means} ({len(lengths[0])} steps at T=0)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("target_dir", "data_dir", "out_dir"):
        parser.add_argument(name, type=Path)
    parser.add_argument("minutes", type=float, nargs="?", default=15.0)
    for flag, default in (("--hidden", 256), ("--layers", 1), ("--ffn", 960), ("--rows", 1600), ("--threads", 1)):
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--pool", type=Path, default=Path("pool.pt"), help="kept here, and taken from here when it is there")
    parser.add_argument("--start", type=Path, help="a draft to train further, in another directory than OUT_DIR")
    parser.add_argument("--evaluate", action="store_true", help="train nothing")
    if not (args := parser.parse_args()).evaluate:
        if not args.pool.exists():
            torch.save(build_pool(args.target_dir, args.data_dir, args.rows), args.pool)
        pool: Pool = torch.load(args.pool)
        torch.manual_seed(0)
        torch.set_num_threads(args.threads)
        target, start = load(args.target_dir), args.start and LlamaForCausalLM.from_pretrained(args.start, dtype=torch.float32)
        draft = start or new_draft(target, pool[1], args.hidden, args.layers, args.ffn)
        print(f"parameters {sum(p.numel() for p in draft.parameters())}, pool tokens {pool[0].numel()}", flush=True)
        train(draft, target, pool, args.minutes, (args.target_dir, args.out_dir))
    evaluate(args.target_dir, args.out_dir)


if __name__ == "__main__":
    main()

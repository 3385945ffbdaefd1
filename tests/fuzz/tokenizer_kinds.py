"""The files of a tokenizer, chat templates among them."""

import base64
import json
from contextlib import suppress
from copy import deepcopy
from typing import Any

from fuzz.damage import BYTES, Rng, damaged_json, damaged_json_text, pick
from fuzz.kind import JsonKind, Kind
from harness.checkpoints import write_byte_fallback_tokenizer, write_byte_level_tokenizer, write_tokenizer

TEXTS = ("the cat sat", "", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab", "é你😀👩‍👩‍👧\x00\x1b", "<|endoftext|> <0x41> \n\t")
MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
EMPTY_FRAME = [{"SpecialToken": {"id": "[X]", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 9}}]
PARTS: dict[str, list[Any]] = {  # of tokenizers; the library panics over most
    "normalizer": [
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        {"type": "Replace", "pattern": {"Regex": "(a|a)*c"}, "content": "x"},
        {"type": "Prepend", "prepend": ""},
        {"type": "NFKC"},
        {"type": "Strip", "strip_left": True, "strip_right": True},
    ],
    "pre_tokenizer": [
        {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
        {"type": "Metaspace", "replacement": "é", "prepend_scheme": "always", "split": True},
        {"type": "FixedLength", "length": 0},
        {"type": "Digits", "individual_digits": True},
    ],
    "post_processor": [
        {"type": "TemplateProcessing", "pair": [], "special_tokens": {}, "single": EMPTY_FRAME},
        {"type": "BertProcessing", "sep": ["x", 4_000_000_000], "cls": ["y", 1]},
    ],
    "decoder": [
        {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
        {"type": "Strip", "content": "a", "start": 10**9, "stop": 5},
        {"type": "WordPiece", "prefix": "", "cleanup": True},
        {"type": "BPEDecoder", "suffix": ""},
    ],
    "truncation": [{"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 5}],
    "padding": [
        {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": 0, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"},
    ],
}


class TokenizerFile(Kind):
    name, share = "tokenizer.json", 150

    def prepare(self) -> None:
        self.tokenizers = []
        for number, write in enumerate((write_tokenizer, write_byte_level_tokenizer, write_byte_fallback_tokenizer)):
            directory = write(self.folder / str(number))
            self.tokenizers.append(json.loads((directory / "tokenizer.json").read_text(encoding="utf-8")))
        settings = json.loads((self.folder / "0" / "tokenizer_config.json").read_text())
        (self.folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "</s>"}))

        self.valid = json.dumps(self.tokenizers[1]).encode()

    def make(self, rng: Rng) -> bytes:
        value = dict(pick(rng, self.tokenizers))
        if rng.integers(3) == 0:
            part = pick(rng, list(PARTS))
            value[part] = deepcopy(pick(rng, PARTS[part]))
            return json.dumps(value if rng.integers(2) else damaged_json(value, rng)).encode("utf-8", "surrogatepass")
        return damaged_json_text(value, rng)

    def use(self, index: int) -> None:
        from paceline.proof.checkpoint_facts import read_tokenizer
        from paceline.tokenizer.tokenizer import Tokenizer

        if index % 4 == 0:
            read_tokenizer(self.folder)
        use_tokenizer(Tokenizer.open(self.folder))


def use_tokenizer(tokenizer: Any) -> None:
    """Each call of a request may be refused; the others must still do what they do."""
    from paceline.errors import PacelineError

    refusal: PacelineError | None = None
    with suppress(PacelineError):
        tokenizer.encode("half a character \ud83d")
    ids = list(range(0, min(tokenizer.vocab_size, 300), 7))
    detokenizer = tokenizer.detokenizer()
    calls = [lambda text=text: tokenizer.encode(text) for text in TEXTS]
    calls += [lambda: tokenizer.decode(ids), lambda: [detokenizer.push(one) for one in ids], detokenizer.flush, tokenizer.to_json]
    for call in calls:
        try:
            call()
        except PacelineError as error:
            refusal = error
    if refusal is not None:
        raise refusal


RANKS = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"</s>"]
PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"


class TekkenFile(JsonKind):
    name, share = "tekken.json", 40

    def prepare(self) -> None:
        encoded = [base64.b64encode(token).decode() for token in RANKS]
        config = {"pattern": PATTERN, "default_vocab_size": len(RANKS) + 4, "default_num_special_tokens": 4, "version": "v7"}
        self.values = {
            "config": config,
            "special_tokens": [{"rank": rank, "token_str": text} for rank, text in enumerate(("<unk>", "<s>", "</s>"))],
            "vocab": [{"rank": rank, "token_bytes": text, "token_str": None} for rank, text in enumerate(encoded)],
        }

    def use(self, index: int) -> None:
        from paceline.tokenizer.tokenizer import Tokenizer

        use_tokenizer(Tokenizer.open(self.folder))


class TiktokenFile(Kind):
    name, share = "tiktoken.model", 20

    def prepare(self) -> None:
        (self.folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
        added = {"added_tokens_decoder": {"260": {"content": "[BOS]", "special": True}}, "bos_token": "[BOS]"}
        (self.folder / "tokenizer_config.json").write_text(json.dumps(added))
        self.valid = b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(RANKS))

    def make(self, rng: Rng) -> bytes:
        return bytes(pick(rng, BYTES)(self.valid, rng))

    def use(self, index: int) -> None:
        from paceline.tokenizer.tokenizer import Tokenizer

        use_tokenizer(Tokenizer.open(self.folder))


class TokenizerConfigFile(JsonKind):
    """Every 60th also renders a conversation, which takes a separate process."""

    name, share = "tokenizer_config.json", 60

    def prepare(self) -> None:
        write_tokenizer(self.folder)
        self.values = json.loads((self.folder / "tokenizer_config.json").read_text())
        self.values |= {
            "add_bos_token": False,
            "bos_token": {"__type": "AddedToken", "content": "<|endoftext|>", "lstrip": False},
            "model_max_length": 512,
        }
        self.values["added_tokens_decoder"] = {"0": {"content": "<|endoftext|>", "special": True, "normalized": False}}

    def use(self, index: int) -> None:
        from paceline.tokenizer.tokenizer import Tokenizer

        tokenizer = Tokenizer.open(self.folder)
        tokenizer.encode("the cat")
        if index % 60 == 0:
            tokenizer.apply_chat_template(MESSAGES, max_model_len=512)


class SpecialTokensFile(TokenizerConfigFile):
    name, share = "special_tokens_map.json", 20

    def prepare(self) -> None:
        super().prepare()
        self.values = {
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "lstrip": False},
            "additional_special_tokens": ["<x>"],
            "pad_token": None,
        }


class ChatTemplateFile(Kind):
    name, share = "chat_template.jinja", 6
    valid = b"{% for m in messages %}{{ m.content }}{% endfor %}"

    def prepare(self) -> None:
        write_tokenizer(self.folder)
        self.pieces = (
            "{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{% if m.role == 'user' %}", "{% else %}", "{% endif %}",
            "{% set x = 'x' %}", "{{ x * 10**9 }}", "{% for i in range(99999) %}", "{{ 10**(10**7) }}", "{% macro f(a) %}",
            "{% endmacro %}", "{{ f(f) }}", "{{ 1/0 }}", "{{ messages|tojson }}", "{{ raise_exception(messages) }}",
            "{{ x|indent(10**8) }}",
            "{{ '%99999999d'|format(1) }}", "{{ strftime_now('%c') }}", "{% set n = namespace(s='x') %}", "{% set n.s = n.s + n.s %}",
            "{% generation %}", "{% endgeneration %}", "{{ bos_token }}", "\n", "{{", "}}", "{{ ''.join(messages) }}", "{{ messages[99] }}",
            "{{ x.__class__ }}", "{% break %}", "{{ dict(a=1) }}", "{{ cycler() }}", "{# ", "\x00",
        )  # fmt: skip

    def make(self, rng: Rng) -> bytes:
        if rng.integers(4) == 0:
            text = json.loads((self.folder / "tokenizer_config.json").read_text())["chat_template"].encode()
            return bytes(pick(rng, BYTES)(text, rng))
        return "".join(pick(rng, self.pieces) for _ in range(int(rng.integers(1, 12)))).encode()

    def use(self, index: int) -> None:
        from paceline.tokenizer.tokenizer import Tokenizer

        tokenizer = Tokenizer.open(self.folder)
        tokenizer.apply_chat_template(MESSAGES, max_model_len=512)

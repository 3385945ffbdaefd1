"""Runs where llama-cpp-python is installed: llama.cpp's ids of texts, for GGUF files that hold only a vocabulary.

python llama_tokens.py TEXTS.json OUT.json MODEL.gguf…
"""

import json
import sys

import llama_cpp as api

_SILENT = api.llama_log_callback(lambda level, text, data: None)


def main() -> None:
    texts_path, out, *paths = sys.argv[1:]
    with open(texts_path, encoding="utf-8") as file:
        texts = [text.encode() for text in json.load(file)]
    api.llama_log_set(_SILENT, None)
    found = []
    for path in paths:
        parameters = api.llama_model_default_params()
        parameters.vocab_only = True
        model = api.llama_model_load_from_file(path.encode(), parameters)
        found.append([encode(api.llama_model_get_vocab(model), text) for text in texts] if model else None)
    with open(out, "w", encoding="utf-8") as file:
        json.dump(found, file)


def encode(vocabulary: object, text: bytes) -> list[int]:
    ids = (api.llama_token * (len(text) + 8))()
    count = api.llama_tokenize(vocabulary, text, len(text), ids, len(ids), False, False)
    if count < 0:
        sys.exit("llama.cpp cannot encode a text")
    return list(ids[:count])


if __name__ == "__main__":
    main()

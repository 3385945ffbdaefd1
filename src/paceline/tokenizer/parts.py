"""A tokenizer that is not read from tokenizer.json, but built from another file."""

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer as Backend


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """The tokenizer of a file, with those attributes of a transformers tokenizer that `Tokenizer` uses.

    Attributes:
        backend_tokenizer: the tokenizer, which also adds the BOS and EOS ids if the file requires them.
        special_tokens_map: texts of `bos_token`, `eos_token`, `unk_token` and `pad_token`, as far as the file has them.
        chat_template: Jinja sources by name; the main one is "default". Empty if the file has none.
        end_token_ids: ids that end an answer, in ascending order; empty if the file does not list them.
        notice: message to the user; None = no message.
    """

    backend_tokenizer: Backend
    special_tokens_map: Mapping[str, str]
    chat_template: Mapping[str, str]
    end_token_ids: tuple[int, ...] = ()
    notice: str | None = None

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]:
        """Return the ids of a text; `verbose` is ignored."""
        # Unlike `encode`, `encode_batch_fast` releases the GIL.
        ids: list[int] = self.backend_tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

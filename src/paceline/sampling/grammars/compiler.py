"""Compiles grammars for the vocabulary of one model and caches the results."""

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from paceline.sampling.grammars.compile_sandbox import CompileSandbox
from paceline.sampling.grammars.compiled_grammar import CompiledGrammar, GrammarVocabulary, llguidance_text
from paceline.sampling.grammars.grammar import Grammar, GrammarKind
from paceline.sampling.grammars.matcher import GrammarMatcher, ReasoningSection
from paceline.tokenizer.tokenizer import Tokenizer

_MAX_CACHED_GRAMMARS = 64
_MAX_PROMPT_TAIL_TOKENS = 64  # last prompt tokens that are searched for `reasoning_end`


class GrammarCompiler:
    """Makes a matcher for each request, and caches compiled grammars. Thread-safe.

    Args:
        tokenizer: the model's tokenizer.
        eos_token_ids: ids that end an output.
        limits: values of llguidance's `LLParserLimits` by name; llguidance's defaults apply to the others.

    Attributes:
        sandbox: compiles each new grammar in a child process first; None = grammars are trusted.
    """

    sandbox: CompileSandbox | None = None

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int] = (), *, limits: dict[str, int] | None = None) -> None:
        self._tokenizer, self._eos_token_ids = tokenizer, eos_token_ids
        self._limits = limits or {}
        self._vocabulary: GrammarVocabulary | None = None
        self._cache: OrderedDict[tuple[GrammarKind, str], CompiledGrammar] = OrderedDict()  # least recently used first
        self._lock = Lock()

    def new_matcher(self, grammar: Grammar, prompt_token_ids: Sequence[int] = ()) -> GrammarMatcher:
        """Return a matcher for the output of one request.

        Args:
            prompt_token_ids: if their text ends with `grammar.reasoning_end`, the grammar applies from the first output token on.

        Raises:
            RequestError: the grammar does not compile, no text matches it, or it exceeds the sandbox's limits.
            BackendUnavailableError: llguidance is not installed.
        """
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = GrammarVocabulary(self._tokenizer, self._eos_token_ids)
            is_trusted = grammar.kind is GrammarKind.JSON_OBJECT or (grammar.kind, grammar.text) in self._cache
        if self.sandbox is not None and not is_trusted:  # outside the lock, so that requests with cached grammars do not wait
            self.sandbox.check_grammar(llguidance_text(grammar, self._vocabulary))
        with self._lock:
            compiled = self._compile(grammar, self._vocabulary)
        reasoning = None
        if grammar.reasoning_end is not None:
            marker = grammar.reasoning_end.encode()
            tail = b"".join(map(self._vocabulary.bytes_of, prompt_token_ids[-_MAX_PROMPT_TAIL_TOKENS:]))
            if not tail.rstrip().endswith(marker.rstrip() or marker):
                reasoning = ReasoningSection(marker, self._vocabulary.bytes_of)
        return GrammarMatcher(compiled, reasoning)

    def _compile(self, grammar: Grammar, vocabulary: GrammarVocabulary) -> CompiledGrammar:
        key = (grammar.kind, grammar.text)
        compiled = self._cache.get(key)
        if compiled is None:
            compiled = self._cache[key] = CompiledGrammar(grammar, vocabulary, self._limits)
            if len(self._cache) > _MAX_CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return compiled

"""The table of all kinds of files."""

from fuzz.adapter_kinds import AdapterSafetensorsFile, AdapterSettingsFile
from fuzz.assistant_kinds import AssistantConfigFile, AssistantGgufFile, AssistantSafetensorsFile
from fuzz.head_kinds import (
    BlockConfigFile,
    BlockGgufFile,
    BlockSafetensorsFile,
    GgufModuleFile,
    HeadConfigFile,
    HeadSafetensorsFile,
    HeadTorchFile,
    Pard2ConfigFile,
    Pard2ProjectionFile,
)
from fuzz.kind import Kind
from fuzz.model_kinds import (
    AdapterConfigFile,
    ConfigFile,
    GenerationConfigFile,
    GgufModelFile,
    IndexFile,
    QuantizedCacheFile,
    SafetensorsFile,
)
from fuzz.tokenizer_kinds import ChatTemplateFile, SpecialTokensFile, TekkenFile, TiktokenFile, TokenizerConfigFile, TokenizerFile

KINDS: tuple[type[Kind], ...] = (
    ConfigFile, GenerationConfigFile, AdapterConfigFile, SafetensorsFile, IndexFile, TokenizerFile, TokenizerConfigFile, SpecialTokensFile,
    ChatTemplateFile, GgufModelFile, HeadConfigFile, HeadSafetensorsFile, HeadTorchFile, QuantizedCacheFile, GgufModuleFile,
    BlockConfigFile, BlockSafetensorsFile, BlockGgufFile, Pard2ConfigFile, Pard2ProjectionFile,
    AssistantConfigFile, AssistantSafetensorsFile, AssistantGgufFile, AdapterSettingsFile, AdapterSafetensorsFile,
    TekkenFile, TiktokenFile,
)  # fmt: skip

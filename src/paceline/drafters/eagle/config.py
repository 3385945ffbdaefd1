"""What an EAGLE head is, from its config and the shapes of its tensors; nothing large is read.

What the files do not say is decided by the rules of the reference implementations: no `rope_theta` means 10000, never the target's;
biases and norms are those whose tensors are there; a recurrence through the final norm is honoured in speculators files only.

Source: EAGLE (Li et al. 2024, arXiv:2401.15077, section 4.1), EAGLE-3 (Li et al. 2025, arXiv:2503.01840, section 3), P-EAGLE
(arXiv:2602.01469) and their code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from paceline.drafters.eagle.boundaries import boundaries_of, named_boundaries
from paceline.drafters.eagle.layers import read_layers
from paceline.drafters.eagle.layout import config_fields, is_nested, plain_files
from paceline.drafters.head_files import HeadFiles, check_pairing
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.pairs.config import PairConfig, PairVariant
from paceline.errors import IncompatibleDrafterError
from paceline.models.config import ModelConfig
from paceline.models.json_fields import JsonFields

EAGLE_KINDS = (HeadKind.EAGLE, HeadKind.EAGLE3, HeadKind.PEAGLE)
_HALF_NORMS = ("embedding_layernorm.weight", "hidden_states_layernorm.weight")
_FIRST_NORM, _LAST_NORM = "layers.0.input_layernorm.weight", "norm.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(PairConfig):
    """What a head is; its kind is EAGLE (1 and 2 are the same network), EAGLE3, or PEAGLE, which differs in how it is drafted with.

    Attributes:
        has_fc: EAGLE-3: its features are mixed by `fc`; otherwise they are used as they are.
        norms_embedding: the embedding is normed: EAGLE: before `fc`; EAGLE-3: in front of the attention.
        norms_feature: EAGLE: the feature is normed before `fc`.
        norms_mixture: EAGLE: the first attention reads the mixture normed.
        norms_features, norms_chunks: EAGLE-3: all boundaries together, or each of them, are normed before `fc`.
        norm_before_residual: EAGLE-3: the residual stream begins with the normed feature.
        has_final_norm: there is a norm in front of the head over the vocabulary.
        uses_fc_bias: a bias of `fc` that the file holds is added.
        mask_token_id: P-EAGLE: the token of masked pairs.
    """

    has_fc: bool = True
    norms_embedding: bool = False
    norms_feature: bool = False
    norms_mixture: bool = False
    norms_features: bool = False
    norms_chunks: bool = False
    norm_before_residual: bool = False
    has_final_norm: bool = False
    uses_fc_bias: bool = True
    mask_token_id: int | None = None

    @property
    def is_first(self) -> bool:
        """Whether it mixes token and feature before its first layer, as EAGLE-1 and 2 do."""
        return self.kind is HeadKind.EAGLE


def read_eagle_config(files: HeadFiles, target: ModelConfig, named: PairVariant | None = None) -> EagleConfig:
    """What the head is by the documented defaults.

    Args:
        named: the user's settings, for files that do not name their boundaries or mask token.

    Raises:
        CheckpointError: the config lacks a size or holds an absurd value.
        IncompatibleDrafterError: the head is of a kind we do not run, or made for another target.
    """
    if files.kind not in EAGLE_KINDS:
        raise IncompatibleDrafterError(f"{files.path} is a {files.kind.value} head, not an EAGLE one; name its method's drafter")
    files, named = plain_files(files), named or PairVariant()
    fields = config_fields(files)
    if fields.number("logit_scale", 1.0) != 1.0:
        scale = fields.values["logit_scale"]
        raise IncompatibleDrafterError(f"{fields.path}: logit_scale = {scale}: heads that scale logits cannot be used")
    layers = read_layers(files, fields)
    config = _eagle(files, fields, layers) if files.kind is HeadKind.EAGLE else _eagle3(files, fields, layers, target, named)
    embedding = files.shape("embed_tokens.weight")
    for rows in (None, *_rows_by_id(files, config)):
        check_pairing(files, target, hidden_size=config.feature_size, vocab_rows=rows)
    if not config.has_fc and layers.hidden_size != target.hidden_size:
        raise IncompatibleDrafterError(
            f"{files.path} takes the target's features of {target.hidden_size} values as they are, its own size is "
            f"{layers.hidden_size}: it was made for another model"
        )
    if embedding is None and layers.hidden_size != target.hidden_size:
        raise IncompatibleDrafterError(
            f"{files.path} has no embed_tokens.weight, and the target's rows of {target.hidden_size} values do not fit its "
            f"hidden size {layers.hidden_size}: the file is not complete"
        )
    return config


def _rows_by_id(files: HeadFiles, config: EagleConfig) -> list[int]:
    """Row counts of the tensors that have one row per target id."""
    shapes = [files.tensors[name].shape[:1] for name in ("t2d", "embed_tokens.weight") if name in files.tensors]
    whole = config.is_first and config.own_lm_head and "token_map" not in files.tensors
    return [rows for shape in shapes for rows in shape] + [config.layers.vocab_size] * whole


def is_left_out(files: HeadFiles, name: str) -> bool:
    """Whether a tensor is known to be unused: what trainers keep of the target, and the norms that vLLM's EAGLE stores but applies only
    where `skip_prenorm` and `skip_output_norm` are false."""
    return name.startswith("verifier_") or (name in (_FIRST_NORM, _LAST_NORM) and files.kind is HeadKind.EAGLE and is_nested(files))


def holds_norm(files: HeadFiles, config: EagleConfig) -> bool:
    """Whether the file must hold a final norm: also if only one of the conventions to try applies it."""
    return config.has_final_norm or (not config.is_first and means_no_norm(files, config_fields(files)))


def _eagle(files: HeadFiles, fields: JsonFields, layers: ModelConfig) -> EagleConfig:
    """EAGLE-1 and 2, and HASS, which adds norms; where these apply depends on what wrote the file.

    Raises:
        CheckpointError: a switch is not a boolean.
    """
    has = {name: name in files.tensors for name in (*_HALF_NORMS, _FIRST_NORM, _LAST_NORM)}
    norms_embedding, norms_feature = has[_HALF_NORMS[0]], has[_HALF_NORMS[1]]
    norms_mixture, has_final_norm, normed_recurrence = has[_FIRST_NORM], has[_LAST_NORM], False
    if files.is_speculators:
        norms_embedding = norms_mixture = has_final_norm = fields.flag("layernorms", default=any(has.values()))
        norms_feature = False
    elif is_nested(files):
        norms_embedding = norms_feature = fields.flag("add_para_norm", default=False)
        norms_mixture = not fields.flag("skip_prenorm", default=True)
        has_final_norm = normed_recurrence = not fields.flag("skip_output_norm", default=True)
    lm_head = files.shape("lm_head.weight")
    token_map = files.tensors.get("token_map")
    rows = layers.vocab_size if lm_head is None else lm_head[0]
    return EagleConfig(
        kind=files.kind,
        layers=replace(layers, vocab_size=rows if token_map is None else prod(token_map.shape)),
        feature_size=layers.hidden_size,
        norms_embedding=norms_embedding,
        norms_feature=norms_feature,
        norms_mixture=norms_mixture,
        has_final_norm=has_final_norm,
        normed_recurrence=normed_recurrence,
        uses_fc_bias=fields.flag("bias", default=True) if is_nested(files) else True,
        own_embedding="embed_tokens.weight" in files.tensors,
        own_lm_head=lm_head is not None,
    )


def _eagle3(files: HeadFiles, fields: JsonFields, layers: ModelConfig, target: ModelConfig, named: PairVariant) -> EagleConfig:
    nested = files.config.get("eagle_config")
    switches = JsonFields(nested if isinstance(nested, Mapping) else {}, fields.path)
    if switches.flag("use_mtp_layernorm", default=False) or switches.size("parallel_draft_step", 1) > 1:
        raise IncompatibleDrafterError(f"{fields.path}: heads with use_mtp_layernorm or parallel_draft_step > 1 are not supported")
    fc, lm_head = files.shape("fc.weight"), files.shape("lm_head.weight")
    has_fc = switches.flag("use_aux_hidden_state", default=True) or fc is not None
    feature_size = fields.size("target_hidden_size", target.hidden_size, null=target.hidden_size)
    if fc is not None and fc[1] % feature_size:
        raise IncompatibleDrafterError(
            f"{files.path}: fc.weight takes {fc[1]} values, which are no whole number of the target's features of {feature_size}: "
            "the head was made for another model"
        )
    count = fc[1] // feature_size if fc is not None else fields.size("num_aux_hidden_states", 3)
    boundaries: tuple[int, ...] = ()
    if has_fc and named.boundaries is not None:
        boundaries = named_boundaries(named.boundaries, count, target.num_layers)
    elif has_fc:
        boundaries = boundaries_of(files, switches, fields, count, target.num_layers)
    vocab_size = fields.size("draft_vocab_size", layers.vocab_size, null=layers.vocab_size) if lm_head is None else lm_head[0]
    return EagleConfig(
        kind=files.kind,
        layers=replace(layers, vocab_size=vocab_size),
        feature_size=feature_size,
        boundaries=boundaries,
        has_fc=has_fc,
        norms_features=fields.flag("norm_before_fc", default=False) or "input_norm.weight" in files.tensors,
        norms_chunks=fields.flag("fc_norm", default=False) or "fc_norm.0.weight" in files.tensors,
        norms_embedding=switches.flag("use_input_layernorm_in_first_layer", default=True),
        norm_before_residual=fields.flag("norm_before_residual", default=False),
        has_final_norm=switches.flag("use_last_layernorm", default=True) and not means_no_norm(files, fields),
        normed_recurrence=files.is_speculators and fields.flag("norm_output", default=False),
        own_embedding="embed_tokens.weight" in files.tensors,
        own_lm_head=lm_head is not None,
        mask_token_id=_mask_token_id(files, fields, named) if files.kind is HeadKind.PEAGLE else None,
    )


def means_no_norm(files: HeadFiles, fields: JsonFields) -> bool:
    """Whether `norm_output: false` may mean what SpecForge means: logits without a norm. Elsewhere it is about the recurrence."""
    return not files.is_speculators and files.kind is HeadKind.EAGLE3 and not fields.flag("norm_output", default=True)


def _mask_token_id(files: HeadFiles, fields: JsonFields, named: PairVariant) -> int:
    """The mask token, by its names in vLLM, speculators and Automodel.

    Raises:
        IncompatibleDrafterError: neither the files nor the user name it.
    """
    if named.mask_token_id is not None:
        return named.mask_token_id
    block = files.config.get("dflash_config")
    for values in (block if isinstance(block, Mapping) else {}, fields.values):
        for name in ("mask_token_id", "pard_token", "ptd_token_id"):
            if ids := JsonFields(values, fields.path).token_ids(name):
                return ids[0]
    raise IncompatibleDrafterError(
        f"{fields.path} names no mask_token_id, the token of positions that a peagle head guesses at once: the drafter option "
        "'mask_token_id' names it"
    )

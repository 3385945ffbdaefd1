"""The configuration of any head that drafts with pairs."""

from dataclasses import dataclass, replace

from paceline.drafters.head_kinds import HeadKind
from paceline.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PairConfig:
    """A head's configuration.

    Attributes:
        kind: the method.
        layers: sizes of its decoder layers; `max_positions` is what it was trained for.
        feature_size: width of one of the target's activations.
        boundaries: the target's layer boundaries it reads, ascending; none = the final hidden state.
        normed_recurrence: the next feature is the output behind the final norm.
        own_embedding, own_lm_head: whether the file has them; otherwise they are the target's.
    """

    kind: HeadKind
    layers: ModelConfig
    feature_size: int
    boundaries: tuple[int, ...] = ()
    normed_recurrence: bool = False
    own_embedding: bool = True
    own_lm_head: bool = False

    @property
    def num_features(self) -> int:
        """Values a true pair brings besides its token."""
        return self.feature_size * max(1, len(self.boundaries))


@dataclass(frozen=True, slots=True, kw_only=True)
class PairVariant:
    """Conventions of a head set by its user, for files that lack them or have them wrong; None = as in the files.

    Attributes:
        boundaries: the target's layer boundaries it reads (boundary b enters layer b).
        norm_before_residual: EAGLE-3: the residual stream begins with the normed feature.
        rope_theta: base of the rotations.
        normed_recurrence: the next feature is the output behind the final norm.
        mask_token_id: P-EAGLE: the token of masked pairs; no convention, as the others stay open.
    """

    boundaries: tuple[int, ...] | None = None
    norm_before_residual: bool | None = None
    rope_theta: float | None = None
    normed_recurrence: bool | None = None
    mask_token_id: int | None = None

    @property
    def settles(self) -> bool:
        """Whether it names a convention: then there is no calibration."""
        return replace(self, mask_token_id=None) != PairVariant()

"""What every head that drafts with pairs says of itself."""

from dataclasses import dataclass, replace

from paceline.drafters.head_kinds import HeadKind
from paceline.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PairConfig:
    """What a head is.

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
    """Conventions of a head as its user knows them, for files that do not say or say them wrongly; None = as the files have it.

    Attributes:
        boundaries: the target's layer boundaries it reads (boundary b enters layer b).
        norm_before_residual: EAGLE-3: the residual stream begins with the normed feature.
        rope_theta: base of the rotations.
        normed_recurrence: the next feature is the output behind the final norm.
        mask_token_id: P-EAGLE: the token of positions that nobody has guessed yet; no convention, as nothing else is settled by it.
    """

    boundaries: tuple[int, ...] | None = None
    norm_before_residual: bool | None = None
    rope_theta: float | None = None
    normed_recurrence: bool | None = None
    mask_token_id: int | None = None

    @property
    def settles(self) -> bool:
        """Whether it names a convention: nothing is tried out then."""
        return replace(self, mask_token_id=None) != PairVariant()

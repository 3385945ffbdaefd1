"""How often guesses are kept: ranges taken from publications, assumptions until one's own texts are measured."""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.drafters.head_kinds import HeadKind


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The chance that a guess is kept once those before it were.

    Attributes:
        low, high: between which it lies for most texts.
        source: who measured, and on what.
    """

    low: float
    high: float
    source: str

    def times(self, share: float) -> "Acceptance":
        """The same where a drafter can say only this share of the tokens."""
        return Acceptance(self.low * share, self.high * share, self.source)


ACCEPTANCE: Mapping[str, Acceptance] = {
    HeadKind.LANGUAGE_MODEL.value: Acceptance(0.55, 0.80, "Leviathan et al. 2023, arXiv:2211.17192, table 3: pairs of one family"),
    HeadKind.EAGLE.value: Acceptance(0.60, 0.80, "Li et al. 2024, arXiv:2401.15077, table 2: chains, Vicuna and LLaMA2-Chat"),
    HeadKind.EAGLE3.value: Acceptance(
        0.60, 0.80, "vLLM's test of acceptance lengths, Llama-3.1-8B on MT-bench (0.73, 0.71, 0.68 by depth), and model cards of RedHatAI"
    ),
    HeadKind.PEAGLE.value: Acceptance(0.55, 0.75, "as EAGLE-3, less where all positions are guessed in one pass"),
    HeadKind.MEDUSA.value: Acceptance(
        0.40, 0.60, "Cai et al. 2024, arXiv:2401.10774: the first head is right in about 60 %, later ones less"
    ),
    HeadKind.MTP.value: Acceptance(
        0.65, 0.85, "DeepSeek-V3, arXiv:2412.19437, section 5.4.3: 0.85 to 0.90 for the first guess; later ones less"
    ),
    HeadKind.GEMMA4_ASSISTANT.value: Acceptance(0.60, 0.80, "model cards of assistants: 3.4 tokens a step with five guesses"),
    "ngram": Acceptance(0.05, 0.55, "our measurements: from new prose to text that repeats its prompt"),
    "suffix": Acceptance(0.05, 0.60, "our measurements: from new prose to text that repeats earlier text"),
    "prediction": Acceptance(0.0, 0.95, "the share of the text that is as predicted: anything"),
}
"""By method."""
UNRELATED = Acceptance(
    0.0, 0.55, "nothing says that the two are of one family, and files do not say what they were trained on: up to the least of such pairs"
)
"""Of a draft model with the target's vocabulary whose name is no sibling's: it may be one, or random."""

"""Which drafter should guess for this model? Looks at files and a table, measures the target, and downloads nothing."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config import QuantOptions, draft_quant_options
from paceline.drafters import HeadOptions
from paceline.drafters.head_kinds import HeadKind
from paceline.errors import PacelineError
from paceline.hub import cached_models, is_hub_id, resolve
from paceline.models.checkpoint import is_gguf
from paceline.models.gguf.file import open_gguf
from paceline.models.quantize import matrix_bits
from paceline.proof.checkpoint_facts import CheckpointFacts
from paceline.proof.doctor import DoctorQuestion, DrafterDiagnosis, diagnose, draft_memory, examine_drafter
from paceline.proof.recommendation.advice import Advice, Place, Recommendation, Rejection, best_first
from paceline.proof.recommendation.assumptions import ACCEPTANCE, UNRELATED, Acceptance
from paceline.proof.recommendation.costs import (
    HOST_S,
    MachineCosts,
    head_bytes,
    measure_costs,
    model_bytes,
    parameter_bytes,
    vocabulary_bytes,
)
from paceline.proof.recommendation.forecast import DraftCost, Forecast, forecast
from paceline.proof.recommendation.here import LocalDrafter, drafters_around, own_drafters, unreadable_places, why_no_network
from paceline.proof.recommendation.published import PublishedDrafter, has_own_module, plain_name, published_for
from paceline.proof.recommendation.siblings import MOST_OF_TARGET, Sibling, are_siblings, smaller_siblings
from paceline.small_files import read_json
from paceline.tokenizer.vocabulary import VocabularyMatch

_WITHOUT_NETWORK = {
    "ngram": "guesses what followed the last tokens before, in the prompt and the output",
    "suffix": "guesses what followed most often before, in this and earlier texts",
    "prediction": "guesses from a text that the output will resemble, which --prediction-file gives",
}
_IN_ONE_PASS = (HeadKind.MEDUSA.value, HeadKind.PEAGLE.value)
_READS_VOCABULARY = (HeadKind.EAGLE, HeadKind.MTP)  # with the target's own vocabulary matrix
_CACHED_AS = re.compile(r"models--(.+)")  # the hub's cache: models--OWNER--NAME/snapshots/COMMIT
_STORED_AS = re.compile(r"(?:-ud)?[-._](?:(?:i?q\d\w*)|f16|f32|bf16|fp16|fp8|mxfp4|int4|int8|awq|gptq|gguf|qat)$", re.IGNORECASE)
_FILE_PART = re.compile(r"-\d{5}-of-\d{5}$")
_MOST_MARKS = 4  # -GPTQ-Int4, -qat-q4_0-gguf


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendQuestion:
    """What is asked.

    Attributes:
        model, gguf_file: the target, as `paceline run` takes it.
        quantization: the name of a way to quantise while loading, as `paceline run` takes it; with its options.
        draft_quantization: as `paceline run` takes it.
        threads: CPU threads; None = as many as this process may use.
        look_in: further directories to look for drafters in.
        download: hub id of a drafter to fetch first; None = nothing is fetched.
        measures: whether the target is loaded and its passes timed.
    """

    model: str = "mini"
    gguf_file: str | None = None
    quantization: tuple[str, QuantOptions | None] = ("none", None)
    draft_quantization: str = "auto"
    threads: int | None = None
    look_in: Sequence[Path] = ()
    download: str | None = None
    measures: bool = True

    def command(self, drafter: str) -> str:
        """That runs the model with a drafter."""
        words = ["paceline", "run", "--model", self.model, "--drafter", drafter]
        given = {"--gguf-file": self.gguf_file, "--threads": self.threads}
        given |= {
            "--quantization": self.quantization[0],
            "--draft-quantization": None if self.draft_quantization == "auto" else self.draft_quantization,
        }
        for name, value in given.items():
            words += [] if value in (None, "none") else [name, str(value)]
        return shlex.join(words) + (" --prediction-file FILE" if drafter == "prediction" else "")


def recommend(question: RecommendQuestion) -> Advice:
    """Everything there is to guess with, best first. What cannot work becomes a problem or a rejection with its reason.

    Raises:
        PacelineError: `question.download` cannot be fetched.
    """
    fetched = None
    if question.download is not None:
        fetched = LocalDrafter(question.download, resolve(question.download, with_heads=True), question.download)
    advice = Advice(question.model)
    if is_hub_id(question.model) and question.model not in cached_models():
        advice.names = names_of(question.model, None)
        advice.notes.append(
            f"{question.model} is not on this machine: this is what the table of published drafters says, nothing was measured"
        )
        _Advisor(question, advice, None).add_from_tables(here=())
        return advice
    found = diagnose(
        DoctorQuestion(model=question.model, gguf_file=question.gguf_file, drafters=("none",), quantization=question.quantization[1])
    )
    advice.problems += found.problems
    if found.target is None or not found.works:
        return advice
    target = found.target
    advice.target, advice.names = target.as_dict(), names_of(question.model, target.path)
    if question.measures:
        try:
            advice.costs = measure_costs(
                model_bytes(target, question.quantization[1]),
                model=question.model,
                gguf_file=question.gguf_file,
                quantization=question.quantization[0],
                threads=question.threads,
                offline=True,
            )
        except PacelineError as error:
            advice.problems.append(str(error))
            return advice
    else:
        advice.notes.append("the model was not loaded: nothing is predicted of its speed")
    _Advisor(question, advice, target).add_all(fetched)
    return advice


class _Advisor:
    """Collects what there is for one model."""

    def __init__(self, question: RecommendQuestion, advice: Advice, target: CheckpointFacts | None) -> None:
        self._question, self._advice, self._target = question, advice, target
        self._doctor = DoctorQuestion(
            model=question.model, quantization=question.quantization[1], draft_quantization=question.draft_quantization
        )

    def add_all(self, fetched: LocalDrafter | None) -> None:
        """What is here, what needs no files, what is published."""
        assert self._target is not None
        own = own_drafters(self._target.path)
        around = drafters_around(self._target.path, self._question.look_in)
        if fetched is not None and all(one.name != fetched.name for one in around):
            around.append(fetched)
        for drafter in own:
            self._add_local(drafter, Place.OWN)
        for drafter in around:
            why = None if drafter is fetched else why_no_network(drafter.path)
            if why is None:
                self._add_local(drafter, Place.HERE)
            elif drafter.is_looked_for:
                self._advice.rejections.append(Rejection(drafter.asked_as, why))
        for path, why in unreadable_places(self._question.look_in):
            self._advice.rejections.append(Rejection(str(path), why))
        self.add_from_tables(here=[one.name or one.path.name for one in around])

    def add_from_tables(self, here: Sequence[str]) -> None:
        """What needs no files, and what is published and not among the names that are here."""
        known = {plain_name(name) for name in here}
        names = self._advice.names
        for name, text in _WITHOUT_NETWORK.items():
            losses = ("it takes a text to guess from",) if name == "prediction" else ()
            self._add(name, name, Place.BUILT_IN, ACCEPTANCE[name], text, cost=DraftCost(0.0, HOST_S), losses=losses)
        for published in published_for(names):
            if plain_name(published.hub_id) not in known:
                self._add_published(published)
        for sibling in smaller_siblings(names):
            if plain_name(sibling.hub_id) not in known:
                self._add_sibling(sibling)
        if self._target is None and has_own_module(names):
            kind = HeadKind.MTP.value
            self._add(kind, kind, Place.OWN, ACCEPTANCE[kind], "the model's files hold a layer for multi-token prediction")
        self._advice.recommendations = best_first(self._advice.recommendations)

    def _add_local(self, local: LocalDrafter, place: Place) -> None:
        assert self._target is not None
        problems: list[str] = []
        options = HeadOptions.of({})
        found = examine_drafter(local.asked_as, self._target, self._doctor, options, problems)
        share = 0.0 if found.facts is None else found.facts.num_parameters / self._target.num_parameters
        if share >= 1.0 and place is Place.HERE:
            return  # a model of its own, no drafter
        why = next(iter(problems), None) or _why_not(found, share, place)
        if why is not None:
            self._advice.rejections.append(Rejection(local.asked_as, why))
            return
        assert found.pair is not None
        notes: list[str] = []
        memory = draft_memory(found, self._target, self._doctor, "cpu", notes)
        acceptance = self._assumed(found.name, local, place)
        vocabulary = found.pair.vocabulary
        if vocabulary is not None and vocabulary.match is VocabularyMatch.OVERLAPPING and vocabulary.sample_coverage is not None:
            acceptance = acceptance.times(vocabulary.sample_coverage)
        self._add(
            local.asked_as,
            found.name,
            place,
            acceptance,
            found.pair.summary,
            cost=self._network_cost(found.name, self._bytes(found)),
            parameters=_parameters(found),
            memory_bytes=None if memory is None else memory.weights_bytes + memory.cache_bytes_per_1k,
            losses=(*found.pair.notes, *notes, *_losses(found.name)),
        )

    def _assumed(self, method: str, local: LocalDrafter, place: Place) -> Acceptance:
        """The range of a method; of draft models only where names say that the pair is of one family."""
        if method != HeadKind.LANGUAGE_MODEL.value or place is Place.OWN:
            return ACCEPTANCE[method]
        names = names_of(local.name or str(local.path), local.path)
        return ACCEPTANCE[method] if are_siblings(self._advice.names, names) else UNRELATED

    def _add_published(self, published: PublishedDrafter) -> None:
        method, num_bytes = published.method.value, None
        if published.parameters is not None:
            num_bytes = parameter_bytes(published.parameters, self._quant_of(published.method))
            if self._target is not None and published.method in _READS_VOCABULARY:
                num_bytes += vocabulary_bytes(self._target, self._question.quantization[1])
        text = f"published for {published.targets[0]}; whether its files fit, doctor says once they are here"
        self._add_named(published.hub_id, method, text, published.parameters, num_bytes)

    def _add_sibling(self, sibling: Sibling) -> None:
        text = "a smaller model of the same family; vocabularies are compared once it is here"
        num_bytes = parameter_bytes(sibling.parameters, self._quant_of(HeadKind.LANGUAGE_MODEL))
        self._add_named(sibling.hub_id, HeadKind.LANGUAGE_MODEL.value, text, sibling.parameters, num_bytes)

    def _add_named(self, hub_id: str, method: str, text: str, parameters: float | None, num_bytes: float | None) -> None:
        size = "a download of unknown size" if parameters is None else f"a download of {2 * parameters / 1e9:.2g} GB or more"
        cost = None if num_bytes is None else self._network_cost(method, num_bytes)
        losses = (size, *_losses(method))
        self._add(
            hub_id, method, Place.HUB, ACCEPTANCE[method], text, cost=cost, parameters=parameters, memory_bytes=num_bytes, losses=losses
        )

    def _add(
        self,
        drafter: str,
        method: str,
        place: Place,
        acceptance: Acceptance,
        verdict: str,
        *,
        cost: DraftCost | None = None,
        parameters: float | None = None,
        memory_bytes: float | None = None,
        losses: tuple[str, ...] = (),
    ) -> None:
        costs: MachineCosts | None = self._advice.costs
        expected: Forecast | None = None if cost is None or costs is None else forecast(acceptance, cost, costs.pass_s)
        self._advice.recommendations.append(
            Recommendation(
                drafter=drafter,
                method=method,
                place=place,
                command=self._question.command(drafter),
                acceptance=acceptance,
                verdict=verdict,
                parameters=parameters,
                memory_bytes=memory_bytes,
                forecast=expected,
                losses=losses,
            )
        )

    def _bytes(self, found: DrafterDiagnosis) -> float:
        assert self._target is not None
        if found.head is not None:
            return head_bytes(found.head, self._target, self._quant_of(found.head.kind))
        assert found.facts is not None
        return model_bytes(found.facts, self._quant_of(HeadKind.LANGUAGE_MODEL))

    def _quant_of(self, kind: HeadKind) -> QuantOptions | None:
        """How a drafter is quantised."""
        if kind is not HeadKind.LANGUAGE_MODEL or self._target is None:
            return draft_quant_options(self._question.draft_quantization, None)
        return draft_quant_options(self._question.draft_quantization, matrix_bits(self._target.weights, self._question.quantization[1]))

    def _network_cost(self, method: str, num_bytes: float) -> DraftCost | None:
        costs = self._advice.costs
        if costs is None:
            return None
        seconds = costs.draft_pass_s(num_bytes)
        return DraftCost(0.0, HOST_S + seconds) if method in _IN_ONE_PASS else DraftCost(seconds, HOST_S)


def _why_not(found: DrafterDiagnosis, share: float, place: Place) -> str | None:
    """Why a pair that can work is not recommended."""
    vocabulary = None if found.pair is None else found.pair.vocabulary
    if vocabulary is not None and vocabulary.match is VocabularyMatch.DISJOINT:
        text = f"{vocabulary.describe_match()}; {vocabulary.describe_conversion()}"
        return f"{text}: another vocabulary costs more guesses than it is worth where others are there"
    if place is Place.HERE and share > MOST_OF_TARGET:
        return f"it has {share:.0%} of the target's parameters: a guess costs nearly as much as a plain step"
    return None


def _parameters(found: DrafterDiagnosis) -> float | None:
    if found.facts is not None:
        return float(found.facts.num_parameters)
    return None if found.head is None else float(found.head.as_dict()["parameters"])


def _losses(method: str) -> tuple[str, ...]:
    if method == HeadKind.LANGUAGE_MODEL.value:
        return ("it reads the prompt as well: the first guess comes later",)
    return ()


def names_of(model: str, path: Path | None) -> tuple[str, ...]:
    """Names a model goes by, as tables of drafters have them; the likeliest first.

    They are without owners, in small letters, and without marks of how weights are stored.

    Args:
        model: as the user typed it.
        path: of its files; None = they are not here.
    """
    found = [model] if path is None else [*_cached_id(path), path.stem if path.is_file() else path.name, *_told_by_files(path)]
    plain = [_without_marks(plain_name(name)) for name in found if name]
    return tuple(dict.fromkeys(name for name in plain if name))


def _cached_id(path: Path) -> list[str]:
    return [match[1].replace("--", "/") for part in path.parts if (match := _CACHED_AS.fullmatch(part))]


def _told_by_files(path: Path) -> list[str]:
    """What the files themselves say."""
    try:
        if is_gguf(path):
            metadata = open_gguf(path).metadata
            names = [metadata.get("general.name"), metadata.get("general.basename")]
        else:
            names = [(read_json(path / "config.json") or {}).get("_name_or_path")]
    except PacelineError:  # reading the model will say so
        return []
    return [name.replace(" ", "-") for name in names if isinstance(name, str)]


def _without_marks(name: str) -> str:
    name = _FILE_PART.sub("", name)
    for _ in range(_MOST_MARKS):
        name = _STORED_AS.sub("", name)
    return name

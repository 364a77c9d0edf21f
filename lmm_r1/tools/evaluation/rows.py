"""The rows of files and suites on which checkpoints are measured, and their judged responses, sampled or saved."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from lmm_r1.config.evaluate import RESPONSES_SUFFIX, EvaluateConfig, responses_path
from lmm_r1.config.generation import reward_part
from lmm_r1.config.ppo import DEFAULT_VERIFIER
from lmm_r1.config.rewards import columns_of, reward_list
from lmm_r1.data.files import read_row_file
from lmm_r1.data.messages import Row, SkippedRow, TextPart, check_asks, images_of
from lmm_r1.data.reading import AS_THEY_ARE, RowReading
from lmm_r1.data.sample import Completion
from lmm_r1.errors import UserError
from lmm_r1.records.responses import JudgedResponse, VerifierVerdict, by_row, read_responses
from lmm_r1.scoring.sources import SourceJudge, VerifierJudge, sum_of
from lmm_r1.tools.evaluation.board import CheckpointResponses, MeasuredFile
from lmm_r1.tools.evaluation.scores import environment_scores, episode_of, powers_of_two
from lmm_r1.tools.recipes import (
    MediaFiles,
    Recipe,
    SourceFiles,
    SuiteSampling,
    get_recipe,
    hub_files,
    local_files,
    recipe_names,
)
from lmm_r1.tools.recipes.preparation import RecordView, check_embedded_images, read_manifest
from remote_rm.verifier import Item, Score


@cache
def suite_names() -> tuple[str, ...]:
    """Return the names of the built-in suites."""
    return tuple(name for name in recipe_names() if get_recipe(name).is_suite)


def get_suite(name: str) -> Recipe:
    """Return a built-in suite by its name, or the one in a YAML file; raises UserError for an unknown name."""
    if name in recipe_names() and name not in suite_names():
        raise UserError(
            f"--suite {name}: this recipe is for training, because it has no field sampling; measure on rows that "
            "`lmm-r1 prepare_data` made of it, with --files"
        )
    suite = get_recipe(name, what="--suite", names=suite_names())
    if not suite.is_suite:
        raise UserError(f"--suite {name}: the recipe has no field sampling; add it")
    return suite


def load_suite(
    recipe: Recipe, *, path: str | None = None, max_rows: int | None = None
) -> tuple[dict[int, Row], list[SkippedRow]]:
    """Return the first `max_rows` rows of a suite by their index in its dataset, and those that cannot be used.

    Args:
        path: a local copy, a folder made by `prepare_data`, or what `read_records` takes; None takes the hub's dataset.
    """
    if path is not None and (manifest := read_manifest(Path(path))) is not None:
        if manifest.recipe_sha256 != recipe.digest:
            same = manifest.recipe == recipe.name
            found = "an older version of it" if same else f"the recipe {manifest.recipe}"
            raise UserError(
                f"suite {recipe.name}: {path} was prepared with {found}; run `lmm-r1 prepare_data {recipe.name} --output "
                "FOLDER` and give that folder"
            )
        prepared = read_row_file(path, max_rows=max_rows, bad_rows="skip")
        return prepared.rows, prepared.skipped
    source = _source(recipe, path=path)
    rows: dict[int, Row] = {}
    skipped: list[SkippedRow] = []
    with MediaFiles(source.media, folder=source.folder, unpack_into=None) as finder:
        for index, record in enumerate(source.records(split=recipe.source.split)):
            if max_rows is not None and len(rows) + len(skipped) == max_rows:
                break
            try:
                view = RecordView(record, recipe=recipe, finder=finder)
                if view.failed_filter() is not None:
                    continue
                row = view.row()
                check_embedded_images(row)
                rows[index] = row
            except UserError as error:
                skipped.append(SkippedRow(index=index, reason=str(error)))
    if not rows:
        first = (
            f"none of its {len(skipped)} rows can be used; the first: {skipped[0].reason}" if skipped else "no rows"
        )
        raise UserError(f"suite {recipe.name}, {path or recipe.source.dataset}: {first}")
    return rows, skipped


def _source(recipe: Recipe, *, path: str | None) -> SourceFiles:
    if path is not None:
        if Path(path).exists():
            return local_files(recipe, Path(path))
        # The name of another dataset on the hub, or a missing path, which `read_records` reports.
        return SourceFiles(folder=Path(), rows=(Path(path),), media=(), revision=None)
    local = f"give a local copy with --suite_data {recipe.name}=PATH"
    if recipe.source.dataset is None:
        raise UserError(f"suite {recipe.name}: the hub has no dataset for it; {local}: {recipe.source.obtain}")
    try:
        return hub_files(recipe)
    except UserError as error:
        raise UserError(
            f"suite {recipe.name}: {recipe.source.dataset}: no such file or folder, and no dataset of this name is "
            f"available: {error}; or {local}"
        ) from error


def file_rows(
    name: str,
    path: str,
    *,
    config: EvaluateConfig,
    reading: RowReading = AS_THEY_ARE,
    defaults: tuple[str, ...] = (DEFAULT_VERIFIER,),
) -> MeasuredFile:
    """Return a file of rows; raises UserError if it cannot be read or none of its rows can be used.

    Args:
        defaults: the verifiers without --reward.
    """
    verifiers = config.reward or defaults
    # A part of an environment's reward needs no answer.
    judged = any(reward_part(verifier) is None for verifier in verifiers)
    read = read_row_file(path, max_rows=config.max_rows, reading=reading, answer_required=judged, bad_rows="skip")
    rows: dict[int, Row] = {}
    skipped = list(read.skipped)
    for index, row in read.rows.items():
        try:
            check_asks(row)
            check_embedded_images(row)
            rows[index] = row
        except UserError as error:
            skipped.append(SkippedRow(index=index, reason=str(error)))
    if not rows:
        raise UserError(f"{path}: none of its rows can be used; the first: {skipped[len(read.skipped)].reason}")
    skipped.sort(key=lambda row: row.index)
    made = _measured_file(name, path, rows, skipped, verifiers=verifiers, sampling=SuiteSampling(), config=config)
    return replace(made, notes=(read.summary_as_prompts, *made.notes))


def suite_rows(recipe: Recipe, *, path: str | None, config: EvaluateConfig) -> MeasuredFile:
    """Return a suite, from a local copy or from the hub; raises UserError as `load_suite` does."""
    rows, skipped = load_suite(recipe, path=path, max_rows=config.max_rows)
    assert recipe.sampling is not None, "a suite has sampling settings"
    source, verifiers = path or str(recipe.source.dataset), config.reward or recipe.verifiers
    made = _measured_file(
        recipe.name, source, rows, skipped, verifiers=verifiers, sampling=recipe.sampling, config=config
    )
    found = len(rows) + len(skipped)
    if config.max_rows is not None or recipe.rows in (None, found):
        return made
    note = f"suite {recipe.name}: {found:,} rows were found, but the benchmark has {recipe.rows:,}"
    return replace(made, notes=(*made.notes, note))


def _measured_file(
    name: str,
    source: str,
    rows: dict[int, Row],
    skipped: Sequence[SkippedRow],
    *,
    verifiers: Sequence[str],
    sampling: SuiteSampling,
    config: EvaluateConfig,
) -> MeasuredFile:
    changes = {field: getattr(config, field) for field in SuiteSampling.model_fields}
    sampling = sampling.model_copy(update={field: value for field, value in changes.items() if value is not None})
    count, notes = sampling.n_samples, []
    if count > 1 and sampling.temperature == 0:
        notes = [f"{name}: at temperature 0 the {count} samples of a row are identical; raise --temperature"]
    for k in config.k:
        if not 1 <= k <= count:
            raise UserError(
                f"--k {k}: {name} has {count} samples per row, so k must be from 1 to {count}; raise --n_samples"
            )
    return MeasuredFile(
        name=name,
        source=source,
        verifiers=columns_of(verifiers),
        ks=tuple(sorted(set(config.k))) or tuple(powers_of_two(count)),
        sampling=sampling.model_dump(),
        skipped=tuple(skipped),
        rows=rows,
        notes=tuple(notes),
    )


def judge_responses(
    completions: Mapping[int, Sequence[Completion]],
    *,
    checkpoint: str,
    file: MeasuredFile,
    judges: Mapping[str, VerifierJudge | SourceJudge],
) -> list[JudgedResponse]:
    """Return the responses with the verdicts of the file's verifiers, row by row; raises UserError if a function fails."""
    asked = [
        (index, file.rows[index], sample, completion)
        for index, samples in completions.items()
        for sample, completion in enumerate(samples)
    ]
    items = [
        Item(prompt=question_of(row), response=completion.text, label=row.answer, image_scales=completion.image_scales)
        for _, row, _, completion in asked
    ]
    played = [completion.played for _, _, _, completion in asked]
    groups = [(file.rows[index], samples) for index, samples in completions.items()]
    judged: dict[str, list[Score]] = {}
    for verifier in file.verifiers:
        judge = judges.get(verifier)
        if listed := reward_list(verifier):
            sums = (sum_of(listed, scores) for scores in zip(*(judged[part.source] for part in listed), strict=True))
            judged[verifier] = [replace(one, score=one.reward) for one in sums]
        elif judge is None:
            judged[verifier] = environment_scores(verifier, played)
        else:
            judged[verifier] = judge.score_groups(groups) if isinstance(judge, SourceJudge) else judge.judge(items)
    return [
        JudgedResponse(
            checkpoint=checkpoint,
            file=file.name,
            index=index,
            row=row.location,
            datasource=row.datasource,
            label=row.answer,
            question=items[place].prompt,
            sample=sample,
            response=completion.text,
            response_tokens=completion.num_tokens,
            finish_reason=completion.finish_reason,
            verdicts={
                verifier: VerifierVerdict(
                    score=scores[place].score, parts=scores[place].parts, timed_out=scores[place].timed_out
                )
                for verifier, scores in judged.items()
            },
            episode=None if completion.played is None else episode_of(completion.played),
            images=len(images_of(row.messages)),
        )
        for place, (index, row, sample, completion) in enumerate(asked)
    ]


def question_of(row: Row) -> str:
    """Return the text of the user's turns."""
    return "\n".join(
        part.text
        for message in row.messages
        if message.role == "user"
        for part in message.parts
        if isinstance(part, TextPart)
    )


# The end of a row's location, after its file.
_PLACE = re.compile(r" (?:line|row) \d+$")


def saved_checkpoints(entries: Sequence[str]) -> list[CheckpointResponses]:
    """Return the checkpoints in files of responses; if two have the same name, both are called `NAME (FILE)`.

    Args:
        entries: `PATH` for every checkpoint in a file, `NAME=PATH` for one of them; PATH is a file of responses, or
            the JSON next to it.
    """
    found: list[tuple[str, Path, list[JudgedResponse]]] = []
    for entry in entries:
        name, equals, end = entry.rpartition("=")
        # A path may contain the sign, too.
        wanted, path = (name, Path(end)) if equals and not Path(entry).exists() else ("", Path(entry))
        if path.suffix == ".json":
            path = responses_path(path)
        by_name: dict[str, list[JudgedResponse]] = {}
        for response in read_responses(path):
            by_name.setdefault(response.checkpoint, []).append(response)
        if wanted and wanted not in by_name:
            raise UserError(f"--compare {entry}: {path} has no checkpoint {wanted}; it has {', '.join(by_name)}")
        found += [(name, path, own) for name, own in by_name.items() if wanted in ("", name)]
    if len(found) < 2:
        raise UserError(f"--compare {' '.join(entries)}: two checkpoints are needed to compare, found {len(found)}")
    names = [name for name, _, _ in found]
    titles = [
        f"{name} ({path.name.removesuffix(RESPONSES_SUFFIX)})" if names.count(name) > 1 else name
        for name, path, _ in found
    ]
    if len(set(titles)) < len(titles):
        raise UserError(f"--compare {' '.join(entries)}: the same checkpoint is given twice")
    checkpoints = []
    for title, (_, path, own) in zip(titles, found, strict=True):
        files: dict[str, list[JudgedResponse]] = {}
        for response in own:
            files.setdefault(response.file, []).append(replace(response, checkpoint=title))
        checkpoints.append(CheckpointResponses(name=title, path=str(path), files=files))
    return checkpoints


def saved_files(checkpoints: Sequence[CheckpointResponses], *, ks: tuple[int, ...] = ()) -> list[MeasuredFile]:
    """Return the files that the checkpoints answered, with the verifiers that judged all of them."""
    names = dict.fromkeys(name for checkpoint in checkpoints for name in checkpoint.files)
    return [_file(name, [own.files[name] for own in checkpoints if name in own.files], ks=ks) for name in names]


def _file(name: str, answered: Sequence[Sequence[JudgedResponse]], *, ks: tuple[int, ...]) -> MeasuredFile:
    everything = [response for responses in answered for response in responses]
    verifiers = tuple(
        verifier
        for verifier in everything[0].verdicts
        if all(verifier in response.verdicts for response in everything)
    )
    if not verifiers:
        raise UserError(f"{name}: no verifier judged it for all checkpoints; evaluate with the same --reward")
    fewest = min(len(row) for responses in answered for row in by_row(responses))
    too_many = [k for k in ks if not 1 <= k <= fewest]
    if too_many:
        raise UserError(f"--k {too_many[0]}: {name} has rows with {fewest} samples, so k must be from 1 to {fewest}")
    return MeasuredFile(
        name=name,
        source=_PLACE.sub("", everything[0].row),
        rows=_rows_at_hand(everything),
        verifiers=verifiers,
        ks=tuple(sorted(set(ks))) or tuple(powers_of_two(fewest)),
    )


def _rows_at_hand(responses: Sequence[JudgedResponse]) -> dict[int, Row]:
    """Return the rows with images that the responses answer, by index, if their file still exists.

    A row counts only if its question is the one that was answered: other images would mislead. It also keeps files of this
    machine out of a page if a file of responses from elsewhere names them.
    """
    pictured = {response.row: response for response in responses if response.images}
    found: dict[int, Row] = {}
    for path in {_PLACE.sub("", location) for location in pictured}:
        try:
            rows = read_row_file(path, answer_required=False, bad_rows="skip").rows if Path(path).is_file() else {}
        except UserError:
            # Only a recipe can read the row file of a suite.
            continue
        for row in rows.values():
            response = pictured.get(row.location)
            if response is not None and question_of(row) == response.question:
                found[response.index] = row
    return found

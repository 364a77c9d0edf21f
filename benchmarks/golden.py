"""The golden record: what the trainers, the verifiers and the readers compute today, with which later trees are compared.

python benchmarks/golden.py record [PART | PART/CASE ...]     write benchmarks/golden/PART.json
python benchmarks/golden.py compare [PART | PART/CASE ...]    compute it again, and list every difference
python benchmarks/golden.py compare rl/gspo --flags --actor.eps_clip_low_high 0.02 0.031     a planted difference

Without names, all parts. `compare` exits with 1 if anything differs: integers and texts exactly, floats beyond `TOLERANCE`.
Rollouts and published configs are inputs, which `record` makes only if there are none. The repository's record is of a
processor with AVX2; with others floats differ by up to a thousandth, so record the earlier tree there, with `--folder`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib
import json
import math
import os
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import yaml
from machine import ROOT

if TYPE_CHECKING:
    import torch

FOLDER = Path(__file__).parent / "golden"
SAMPLES, TABLES = ROOT / "datasets/samples", ROOT / "tests/data/tables"
TOLERANCE = 3e-5
"""The largest relative difference of a float, and of a tensor's change in multiples of the change's norm. Sums in another
order differ: the same rollouts in padded passes of one sample differ by up to 2e-5 from packed ones with shared prefixes."""
LEAST = 0.1
"""Floats below it may differ by as much as this one: means of values that cancel have no last bits of their own."""
LEAST_SHARE = 1e-2
"""The same for tensors, as a share of the norm of the whole model's change: some gradients are 0 but for rounding."""
THREADS = "2"
COLD_START_STEPS, COLD_START_WARMUP = 60, 20
"""The first of the demo's 400."""
ITEM_SECONDS = 10.0
SEED = "1"
UNRECORDED = ("timing/",)  # metrics


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a case is computed with."""

    folder: Path
    """An empty folder."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Further flags of a training, which plant a difference."""
    records: bool = False
    """Whether missing inputs are made."""


Compute = Callable[[str, Given], Any]
"""Returns what a case gives, as JSON; None if this machine lacks its input."""


def main(argv: Sequence[str] | None = None) -> int:
    """Record or compare the parts that are named; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("names", nargs="*", help=f"parts ({', '.join(PARTS)}), or cases as PART/CASE")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the records")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="flags of the trainings, last")
    arguments = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = THREADS
    os.environ["HF_HUB_OFFLINE"] = "1"
    from lmm_r1 import cpu

    cpu.prepare_process()
    import torch

    torch.set_num_threads(int(THREADS))
    found = 0
    for name in chosen(arguments.names, parser):
        found += settle(name, arguments)
    print(f"{found} differences" if arguments.action == "compare" or found else f"recorded in {arguments.folder}")
    return 1 if found else 0


def chosen(names: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the named cases, as PART/CASE."""
    parts = {name.partition("/")[0] for name in names or PARTS}
    every = [f"{part}/{case}" for part, (cases, _) in PARTS.items() if part in parts for case in cases()]
    for name in names:
        if not any(name in (one, one.partition("/")[0]) for one in every):
            parser.error(f"{name} is neither a part ({', '.join(PARTS)}) nor one of these cases: {', '.join(every)}")
    return [one for one in every if not names or one in names or one.partition("/")[0] in names]


def settle(name: str, arguments: argparse.Namespace) -> int:
    """Record or compare a case, and return the number of differences."""
    part, _, case = name.partition("/")
    file = arguments.folder / f"{part}.json"
    recorded = json.loads(file.read_text()) if file.exists() else {}
    cases, compute = PARTS[part]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        given = Given(folder=Path(folder), flags=flags_of(arguments.flags), records=arguments.action == "record")
        try:
            found = compute(case, given)
        except Exception:
            # The other cases are compared all the same.
            print(f"{name}: 1 difference, it fails\n{traceback.format_exc()}", flush=True)
            return 1
    took = f"{time.perf_counter() - began:.0f} s"
    if found is None:
        print(f"{name}: skipped, because its input is not on this machine", flush=True)
        return 0
    found = json.loads(json.dumps(found))
    if arguments.action == "record":
        recorded[case] = found
        lines = [f"{json.dumps(one)}: {json.dumps(recorded[one])}" for one in cases() if one in recorded]
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(f"{name}: recorded ({took})", flush=True)
        return 0
    lines = list(differences(recorded.get(case), found, path=name, tolerance=TOLERANCE))
    print(f"{name}: {f'{len(lines)} differences' if lines else 'as recorded'} ({took})", flush=True)
    for line in lines:
        print(f"  {line}")
    return len(lines)


def flags_of(given: Sequence[str]) -> dict[str, Any]:
    """Return `--NAME VALUE ...` by name, as values of YAML."""
    flags: dict[str, Any] = {}
    for word in given:
        if word.startswith("--"):
            flags[last := word[2:]] = []
        else:
            flags[last].append(yaml.safe_load(word))
    return {name: values[0] if len(values) == 1 else tuple(values) for name, values in flags.items()}


def differences(recorded: Any, found: Any, *, path: str, tolerance: float) -> Iterator[str]:
    """Yield a line for each value that is not the recorded one, with its path and both values."""
    if recorded == found:
        return
    if isinstance(recorded, dict) and isinstance(found, dict):
        if "changes" in recorded:
            yield from _changes(recorded["changes"], found.get("changes", {}), path=path, tolerance=tolerance)
            recorded, found = ({k: v for k, v in one.items() if k != "changes"} for one in (recorded, found))
        for name in dict.fromkeys([*recorded, *found]):
            own = recorded.get(name, MISSING), found.get(name, MISSING)
            yield from differences(*own, path=f"{path} {name}", tolerance=tolerance)
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        for place, own in enumerate(zip(recorded, found, strict=True)):
            yield from differences(*own, path=f"{path}[{place}]", tolerance=tolerance)
    elif isinstance(recorded, float) and isinstance(found, float | int):
        if not abs(recorded - found) <= tolerance * max(abs(recorded), abs(found), LEAST):
            yield f"{path}: recorded {recorded!r}, now {found!r}"
    elif isinstance(recorded, str) and VERDICTS.issuperset(recorded) and len(recorded) == len(found):
        for place, (one, other) in enumerate(zip(recorded, found, strict=True)):
            if one != other:
                yield f"{path}[{place}]: recorded {one}, now {other}"
    else:
        yield f"{path}: recorded {recorded!r}, now {found!r}"


MISSING, VERDICTS = "nothing", set("01t")
NUMBERS = ("sum", "norm", "projection")


def _changes(recorded: Mapping[str, Any], found: Mapping[str, Any], *, path: str, tolerance: float) -> Iterator[str]:
    """Compare tensors' changes, each in multiples of its norm; one that is not listed has not changed."""
    whole = math.hypot(*(numbers[1] for numbers in recorded.values()))
    for name in dict.fromkeys([*recorded, *found]):
        one, other = (side.get(name, [0.0, 0.0, 0.0]) for side in (recorded, found))
        scale = tolerance * max(one[1], LEAST_SHARE * whole)
        for number, its, now in zip(NUMBERS, one, other, strict=True):
            if not abs(its - now) <= scale:
                yield f"{path} {name}: {number} of its change recorded {its!r}, now {now!r}"


def changes(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the fingerprint of the changes of tensors, by their names; tensors that have not changed are left out."""
    own = {name: fingerprint(after[name].double() - before[name].double(), name=name) for name in sorted(after)}
    return {"changes": {name: numbers for name, numbers in own.items() if numbers[1]}}


def fingerprint(values: torch.Tensor, *, name: str) -> list[float]:
    """Return sum, L2 norm and a projection of a tensor in fp64, on numbers that depend on its name alone."""
    import torch

    flat = values.detach().double().flatten()
    # Fractional parts of n^2 times the golden ratio look random, and are the same with every version of every library.
    places = torch.arange(1, len(flat) + 1, dtype=torch.double) + zlib.crc32(name.encode()) % 1000
    weights = torch.frac(places**2 * ((math.sqrt(5) - 1) / 2)) - 0.5
    return [_rounded(value) for value in (flat.sum(), flat.norm(), flat @ weights)]


def _rounded(value: Any) -> float:
    return float(f"{float(value):.9g}")


def recorded_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a step that depend on what was computed."""
    kept = {name: value for name, value in metrics.items() if not name.startswith(UNRECORDED)}
    return {name: _rounded(kept[name]) if isinstance(kept[name], float) else kept[name] for name in sorted(kept)}


def rl(case: str, given: Given) -> dict[str, Any]:
    """Return metrics and changes of the weights after each step of a replayed run."""
    from golden_rl import read_rollouts, replay

    file = FOLDER / "rollouts.jsonl"
    rollouts = read_rollouts(file)
    records = rollouts.get(case, [])
    known = len(records)
    if not records and not given.records:
        raise SystemExit(f"rl/{case}: {file} has no rollout of it; record it first")
    found: dict[str, Any] = {}
    with quietly():
        (_, _, before), *steps = replay(case, records, given.folder, flags=given.flags)
    for model, weights in before.items():
        whole = [fingerprint(value, name=name) for name, value in sorted(weights.items())]
        found[f"{model} at first"] = [_rounded(sum(column)) for column in zip(*whole, strict=True)]
    for step, (metrics, groups, after) in enumerate(steps, start=1):
        models = {model: changes(before[model], weights) for model, weights in after.items()}
        found[f"step {step}"] = {"groups": groups, "metrics": recorded_metrics(metrics), **models}
    if not known:
        rollouts[case] = records
        lines = [json.dumps({"case": one} | record) for one in _rl_cases() for record in rollouts.get(one, ())]
        file.write_text("\n".join(lines) + "\n")
    return found


def _rl_cases() -> Sequence[str]:
    from golden_rl import CASES

    return list(CASES)


QUESTIONS = ("What is 12 + 34?", "Which digit is this?", "And 46 + 1, and why?", "What is left of it?")
ANSWERS = ("<answer>46</answer>", "4", "<think>12 + 34 = 46 and one</think><answer>47</answer>", "<answer>5</answer>")
OTHERS = ("3", "<think>12 + 34</think>", "<think>12 + 34 = 46 and two</think><answer>48</answer>", "6 or so")
FIXED = {"adam.lr": 0.3, "adam.eps": 1.0, "lr_scheduler": "constant", "lr_warmup_ratio": 0.0, "ds.param_dtype": "fp32"}
FIXED |= {"train.batch_size": 4, "train.micro_batch_size": 2, "data.max_len": 1024, "logger.logging_steps": 1}
OWN: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {"model.beta": 0.5, "model.label_smoothing": 0.1, "model.nll_loss_coef": 0.2},
    "rm": {"model.margin_loss_enable": True},
    "kd": {"model.kd_coef": 0.7, "model.kd_loss": "jsd", "model.kd_beta": 0.3, "model.kd_temperature": 1.5},
}


def supervised(case: str, given: Given) -> dict[str, Any]:
    """Return metrics and changes of the weights after two updates on four rows, two of them with images."""
    from golden_rl import CORPUS, medium

    import lmm_r1
    from lmm_r1.lmm_kits import TinyModelSpec, get_kit

    kit, model = get_kit("qwen2_5_vl"), given.folder / "model"
    kit.build_tiny(TinyModelSpec(hidden_size=64, layers=2, seed=3, tie_embeddings=False), CORPUS, model)
    if case == "kd":
        teacher = TinyModelSpec(hidden_size=64, layers=1, seed=4, tie_embeddings=False)
        kit.build_tiny(teacher, CORPUS, given.folder / "teacher")
    rows = []
    for place, (question, answer, other) in enumerate(zip(QUESTIONS, ANSWERS, OTHERS, strict=True)):
        content: list[dict[str, Any]] = [{"type": "text", "text": question}]
        if place % 2:
            content.insert(0, {"type": "image", "image": medium("image", 84, 28 * place, place).source})
        asked = {"role": "user", "content": content}
        pair: dict[str, Any] = {"chosen": [{"role": "assistant", "content": answer}]}
        pair |= {"rejected": [{"role": "assistant", "content": other}], "margin": 0.25 * place}
        one = {"messages": [asked, {"role": "assistant", "content": answer}]}
        rows.append({"prompt": [asked], **pair} if case in ("dpo", "rm") else one)
    flags = FIXED | OWN[case] | {"ckpt.disable_ds": True, "train.max_steps": 2, "train.max_epochs": 2}
    more = {"teacher": given.folder / "teacher"} if case == "kd" else {}
    train = getattr(lmm_r1, f"train_{case}")
    with quietly():
        run = train(flags, given.flags, rows=rows, model=model, output=given.folder / "run", **more)
    before, after = read_weights(model), read_weights(run.folder)
    import torch

    # A reward model's head begins as it is drawn.
    before = {name: before.get(name, torch.zeros_like(value)) for name, value in after.items()}
    return {"metrics": logged(run.folder), "weights": changes(before, after)}


def logged(run: Path) -> list[dict[str, Any]]:
    """Return what a supervised run has logged in each step, without times."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        recorded_metrics({key: value for key, value in line.items() if "second" not in key and "time" not in key})
        for line in lines
    ]


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint."""
    from safetensors.torch import load_file

    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def quietly() -> ExitStack:
    """Return a block whose output is not shown."""
    stack = ExitStack()
    hidden = stack.enter_context(open(os.devnull, "w"))
    stack.enter_context(redirect_stdout(hidden))
    stack.enter_context(redirect_stderr(hidden))
    return stack


def cold_start(case: str, given: Given) -> dict[str, Any]:
    """Return the losses of the first steps of the demo's cold start, with fingerprints of its first weights and rows."""
    import lmm_r1

    settings, model, rows = ROOT / "examples/scripts/lmm_r1/configs/demo", given.folder / "tiny", given.folder / "rows"
    own: dict[str, Any] = {"train.max_steps": COLD_START_STEPS, "train.seed": SEED, "ckpt.disable_ds": True}
    own |= {"logger.logging_steps": 1, "lr_warmup_ratio": COLD_START_WARMUP / COLD_START_STEPS, **given.flags}
    with quietly():
        command("make_tiny_model", "--config", settings / "tiny.yaml", "--arch", "qwen2_5_vl", "--output", model)
        kind = ("--config", settings / "first_rows.yaml", "--modality", "mixed", "--split", "train", "--solutions")
        command("make_task", "digits", *kind, "--output", rows)
        run = lmm_r1.train_sft(
            settings / "cold_start.yaml", own, rows=str(rows), model=model, output=given.folder / "run"
        )
    weights = {f"model {name}": fingerprint(value, name=name) for name, value in read_weights(model).items()}
    digests = {"rows": digest((rows / "rows.jsonl").read_bytes())}
    return {**weights, **digests, "losses": [line["loss"] for line in logged(run.folder)]}


def command(name: str, *words: object) -> None:
    """Run `lmm-r1 NAME` in this process."""
    importlib.import_module(f"lmm_r1.cli.{name}").main([*map(str, words), "--seed", SEED])


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def verdicts(case: str, given: Given) -> dict[str, str] | None:
    """Return which answers each verifier pays, as a row of 0 and 1; t is one that it has not judged in time."""
    if case == "adversary":
        table = yaml.safe_load((TABLES / "remote_rm/answer_adversary.yaml").read_text(encoding="utf-8"))["found"]
        names, digests = ("math", "number", "list", "choice"), {}
        pairs = [(response, label) for response, *labels in table for label in labels]
        asked = dict.fromkeys(names, pairs)
    else:
        files = [folder / "shared/data/judged_answers.jsonl" for folder in ROOT.parents]
        file = next(filter(Path.exists, files), None)
        if file is None:
            return None
        asked, digests = {}, {"answers": digest(file.read_bytes())}
        for row in map(json.loads, file.read_bytes().splitlines()):
            asked.setdefault(row["verifier"], []).append((row["response"], row["label"]))
    return digests | {name: asyncio.run(_judged(name, pairs)) for name, pairs in asked.items()}


async def _judged(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Return the verdicts on pairs of a response and a label, each within a limit of processor time."""
    from remote_rm.registry import get_verifier
    from remote_rm.service.pool import VerifierPool
    from remote_rm.verifier import Item

    pool = VerifierPool(get_verifier(name), workers=int(THREADS), item_timeout_seconds=ITEM_SECONDS)
    await pool.start()
    try:
        scores = await pool.judge([Item(prompt="", response=response, label=label) for response, label in pairs])
    finally:
        await pool.stop()
    return "".join("t" if score.timed_out else str(int(score.parts["accuracy"] >= 1)) for score in scores)


NAMED: dict[str, Any] = {"judged/openrlhf.jsonl": {"prompt": "context", "chosen": "better", "rejected": "worse"}}
"""Columns that no format is detected by, as a user names them."""


def rows(case: str, given: Given) -> dict[str, Any]:
    """Return the rows of a sample of a row format, of judged responses as pairs, with digests of their pictures."""
    from lmm_r1.data.files import read_row_file
    from lmm_r1.data.formats.row_format import ColumnNames
    from lmm_r1.data.preferences import read_pairs
    from lmm_r1.data.reading import RowReading

    file, reading = str(SAMPLES / case), RowReading(names=ColumnNames(**NAMED.get(case, {})))
    pairs = case.startswith("judged/")
    read = read_pairs(file, reading=reading) if pairs else read_row_file(file, reading=reading, answer_required=False)
    return {"format": read.row_format.name, "rows": {str(place): _plain(row) for place, row in read.rows.items()}}


def _plain(value: Any) -> Any:
    """Return a value of a row as JSON: fields by name, pictures and bytes as digests, paths from the root on."""
    from lmm_r1.data.images import load_image
    from lmm_r1.data.messages import ImagePart

    if isinstance(value, ImagePart):
        image = load_image(value, location="golden")
        bounds = [value.min_pixels, value.max_pixels]
        return {"image": digest(image.tobytes()), "size": list(image.size), "bounds": bounds}
    if is_dataclass(value):
        return {own.name: _plain(getattr(value, own.name)) for own in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, bytes):
        return digest(value)
    return value.replace(f"{ROOT}/", "") if isinstance(value, str) else value


def configs(case: str, given: Given) -> dict[str, Any]:
    """Return the settings that a published config is converted to, and what its notes are about."""
    from lmm_r1.tools.migrate import convert, read_run, to_document

    published = next(one for one in _published() if one["name"] == case)
    file = given.folder / published["file"]
    file.write_text(published["text"], encoding="utf-8")
    with mock.patch.dict(os.environ, {"HOME": "/home/me"}):
        run = read_run(file, published["overrides"])
        conversion = convert(run.values, run.table, shown=run.shown, why_open=run.why_open, remarks=run.remarks)
    document = yaml.safe_load(to_document(conversion, source="golden", system="another"))
    notes = sorted({note.subject.replace(f"{given.folder}/", "") for note in conversion.notes})
    return {"command": conversion.command, "settings": document, "notes": notes}


def _published() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / "published.jsonl").read_text().splitlines()]


PARTS: dict[str, tuple[Callable[[], Sequence[str]], Compute]] = {
    "rows": (lambda: sorted(str(one.relative_to(SAMPLES)) for one in SAMPLES.glob("*/*.*") if one.is_file()), rows),
    "configs": (lambda: [one["name"] for one in _published()], configs),
    "verdicts": (lambda: ("adversary", "judged_answers"), verdicts),
    "rl": (_rl_cases, rl),
    "supervised": (lambda: ("sft", "dpo", "rm", "kd"), supervised),
    "cold_start": (lambda: ("demo",), cold_start),
}
"""By name: the cases of a part, and what computes one."""


if __name__ == "__main__":
    sys.exit(main())

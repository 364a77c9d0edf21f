"""Ranks that share packed sequences compute what one process does, for every kit: outputs, gradients, optimizer steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.shared_sequences import run_ranks
from helpers.tiny_models import CORPUS

from lmm_r1.lmm_kits import KITS, TinyModelSpec, get_kit

pytestmark = pytest.mark.slow

# Of which every weight and activation takes double precision.
# Their linear attention layers are refused by name (tests/unit/models/packed/test_sequence_parallel.py).
SHARED_KITS = [name for name in KITS if not name.startswith("qwen3_5")]
DOUBLE_KITS = ("llm", "qwen2_5_vl", "qwen3_vl", "janus", "phi3_v")
# Three samples of the first prompt, two of the second and one of the third.
LENGTHS = [[7, 3, 12], [5, 9], [4]]
VARIANTS: dict[str, dict[str, Any]] = {
    "adapters": {"lora_rank": 4},
    "frozen tower": {"freeze_visual_encoder": True},
    "checkpointing": {"checkpointing": "not reentrant"},
    "reentrant checkpointing": {"checkpointing": "reentrant"},
    "reentrant checkpointing of adapters": {"checkpointing": "reentrant", "lora_rank": 4},
    "every token": {"every_token": True},
}
Found = dict[str, list[Any]]


def case(name: str, folder: Path, *, kind: str = "compare", **settings: Any) -> dict[str, Any]:
    batch = {"messages": "text", "lengths": LENGTHS[:2]}
    if get_kit(name).takes_images:
        batch = {"messages": "images", "lengths": LENGTHS}
    if name == "phi4_multimodal":
        # Its smallest image has hundreds of tokens.
        batch = {"messages": "image", "lengths": LENGTHS[:2]}
    return {"kind": kind, "kit": name, "path": str(folder), **batch, **settings}


@pytest.fixture(scope="module")
def two_ranks(
    request: pytest.FixtureRequest, tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Found:
    """What two ranks found, by case; they compute one sequence together."""
    cases = {"exchange 2": {"kind": "exchange", "key_heads": 2}}
    for name in SHARED_KITS:
        cases[name] = case(name, tiny_checkpoint(name))
    for name in DOUBLE_KITS:
        cases[f"{name} fp64"] = case(name, tiny_checkpoint(name), dtype="fp64")
    for variant, settings in VARIANTS.items():
        cases[variant] = case("qwen2_5_vl", tiny_checkpoint("qwen2_5_vl"), **settings)
    for name, dtype in (("qwen2_5_vl", "fp64"), ("gemma3", "fp32")):
        cases[f"{name} branches"] = case(name, tiny_checkpoint(name), messages="branches", lengths=[], dtype=dtype)
    for stage in (2, 3):
        step = {"kind": "train", "kit": "qwen2_5_vl", "stage": stage, "ulysses_size": 2}
        cases[f"zero {stage}"] = {**step, "path": str(tiny_checkpoint("qwen2_5_vl"))}
    if not any(item.get_closest_marker("full") for item in request.session.items if item.path == request.path):
        cases = {name: cases[name] for name in ("exchange 2", "qwen2_5_vl", "zero 3")}
    return by_case(
        run_ranks(2, {"ulysses_size": 2, "cases": cases}, folder=folder_of(tmp_path_factory), timeout_s=900)
    )


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What four ranks found, for a model of 4 attention heads with 2 heads of keys and values."""
    folder = tmp_path_factory.mktemp("wide")
    cases = {}
    for name in ("qwen2_5_vl", "gemma3"):
        spec = TinyModelSpec(hidden_size=128, layers=2, seed=0, tie_embeddings=False)
        (folder / name).mkdir()
        get_kit(name).build_tiny(spec, CORPUS, folder / name)
        cases[name] = case(name, folder / name)
    for stage in (2, 3):
        step = {"kind": "train", "kit": "qwen2_5_vl", "stage": stage, "ulysses_size": 2}
        cases[f"zero {stage}"] = {**step, "path": str(folder / "qwen2_5_vl")}
    return by_case(
        run_ranks(4, {"ulysses_size": 4, "cases": cases}, folder=folder_of(tmp_path_factory), timeout_s=900)
    )


def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks") / "job"


def by_case(ranks: list[dict[str, Any]]) -> Found:
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def check(ranks: list[dict[str, Any]], *, tolerance: float) -> None:
    for rank in ranks:
        assert rank["outputs"] < tolerance
        assert rank["gradients"] < tolerance
        assert min(rank["largest_output"], rank["norm"], rank["trained"]) > 0.1, "nothing was compared"
        half = len(rank["tokens"]) // 2
        # Rounded up: what is missing to equal shares is filled up.
        assert rank["tokens"][half:] == [-(-alone // len(ranks)) for alone in rank["tokens"][:half]]


def test_tokens_are_exchanged_for_heads_and_gradients_go_back(two_ranks):
    first, second = two_ranks["exchange 2"]
    # Of the numbers 10 x token + head: of 4 heads, 0 and 1 here, 2 and 3 there; of 2 of keys and values, one each.
    assert first["parts"] == [[[0, 10, 20, 30], [1, 11, 21, 31]], *[[[0, 10, 20, 30]]] * 2]
    assert second["parts"] == [[[2, 12, 22, 32], [3, 13, 23, 33]], *[[[1, 11, 21, 31]]] * 2]
    assert first["output"] == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert second["output"] == [[20, 21, 22, 23], [30, 31, 32, 33]]
    # Each rank weights its own tokens by its number, and each of 8 outputs takes the sum of the rank's values once.
    assert first["gradients"] == [[[1, 1]] * 4, [[8, 8]] * 2]
    assert second["gradients"] == [[[2, 2]] * 4, [[8, 8]] * 2]


@pytest.mark.parametrize("name", SHARED_KITS)
def test_two_ranks_compute_log_probs_entropies_and_gradients_of_one_process(two_ranks, name):
    check(two_ranks[name], tolerance=1e-5)


@pytest.mark.parametrize("name", DOUBLE_KITS)
def test_in_double_precision_nothing_differs(two_ranks, name):
    check(two_ranks[f"{name} fp64"], tolerance=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_whatever_trains_and_however_gradients_are_the_same(two_ranks, variant):
    check(two_ranks[variant], tolerance=1e-5)


@pytest.mark.parametrize(("name", "tolerance"), [("qwen2_5_vl", 1e-12), ("gemma3", 1e-5)])
def test_branches_that_share_turns_are_computed_once_by_both(two_ranks, name, tolerance):
    check(two_ranks[f"{name} branches"], tolerance=tolerance)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_four_ranks_share_two_heads_of_keys_and_values(four_ranks, name):
    check(four_ranks[name], tolerance=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("ranks", ["two_ranks", "four_ranks"])
def test_optimizer_steps_under_deepspeed_are_those_of_one_process(request, ranks, stage):
    # Four ranks are two pairs, each with other sequences.
    found = request.getfixturevalue(ranks)[f"zero {stage}"]
    for rank in found:
        assert rank["losses"] == pytest.approx(rank["expected_losses"], abs=1e-5)
        assert rank["norms"] == pytest.approx(rank["expected_norms"], rel=1e-5)
        assert rank["tokens"] == found[0]["tokens"]
    assert found[0]["expected_moved"] > 1e-3
    assert found[0]["weights"] < 1e-5 * max(1.0, found[0]["expected_moved"])

"""What remote_rm/README.md says of its rates is what was measured, on responses that are what the benchmark says."""

import json
import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from reasoning_samples import OUTCOMES, TEXTS, make_samples, reasoning, wording
from reward_reasoning import table_of

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_has_the_measured_figures():
    result = json.loads((ROOT / "benchmarks/results/reward_reasoning.json").read_text())
    page = (ROOT / "remote_rm/README.md").read_text()
    assert table_of(result) in page


def test_texts_are_long_and_differ_by_more_than_numbers():
    rng = random.Random(3)
    texts = [reasoning(rng, kind=kind)[1] for kind in TEXTS["scenarios"] for _ in range(20)]
    assert len({wording(text) for text in texts}) == len(texts) >= 60
    assert all(780 <= len(text) <= 4000 for text in texts)
    assert max(map(len, texts)) > 2 * min(map(len, texts))


def test_responses_are_made_as_their_shares_say():
    samples = make_samples(1600, seed=5)
    assert [sample.response for sample in make_samples(1600, seed=5)] == [sample.response for sample in samples]
    assert abs(sum(sample.is_right for sample in samples) / 1600 - OUTCOMES["right"] / 100) < 0.05
    # Of a response that is cut off nothing of the answer is there.
    cut = [sample for sample in samples if not sample.answer]
    assert abs(len(cut) / 1600 - OUTCOMES["cut off"] / 100) < 0.04
    assert not any("\\boxed" in sample.response or "<answer>" in sample.response for sample in cut)
    assert all(sample.answer in sample.response for sample in samples if sample.answer)

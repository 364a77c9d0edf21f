"""What is selected from scored responses."""

from lmm_r1.tools.batch import select

PROMPT = [{"role": "user", "content": "1+1?"}]


def record(*rewards, texts=None, reasons=None):
    texts = texts or [f"r{number}" for number in range(len(rewards))]
    reasons = reasons or ["stop"] * len(rewards)
    responses = [
        {"text": text, "tokens": 3, "finish_reason": reason, "reward": reward}
        for text, reward, reason in zip(texts, rewards, reasons, strict=True)
    ]
    return {"index": 0, "prompt": PROMPT, "answer": "2", "datasource": "sums", "responses": responses}


def selected(kind, *records, min_reward=1.0, max_per_prompt=1, min_margin=0.0):
    return list(
        select(records, kind=kind, min_reward=min_reward, max_per_prompt=max_per_prompt, min_margin=min_margin)
    )


def texts(rows):
    return [row["messages"][-1]["content"] for row in rows]


def test_the_best_of_n_is_the_first_with_the_highest_reward():
    [row] = selected("best_of_n", record(0.5, 1.5, 1.5, 0.0))
    assert row == {
        "messages": [*PROMPT, {"role": "assistant", "content": "r1"}],
        "reward": 1.5,
        "answer": "2",
        "datasource": "sums",
    }


def test_rejection_sampling_takes_the_best_different_responses_that_are_good_enough():
    many = record(1.0, 1.5, 1.0, 0.5, texts=["a", "b", "a", "c"])
    assert texts(selected("rejection_sampling", many)) == ["b"]
    assert texts(selected("rejection_sampling", many, max_per_prompt=9)) == ["b", "a"]
    assert texts(selected("rejection_sampling", many, max_per_prompt=9, min_reward=0.5)) == ["b", "a", "c"]
    assert selected("rejection_sampling", record(0.5, 0.9)) == []


def test_rejection_sampling_takes_nothing_that_was_cut_off():
    rows = selected("rejection_sampling", record(1.5, 1.0, reasons=["length", "stop"]))
    assert texts(rows) == ["r1"]


def test_a_pair_is_the_best_response_over_the_worst():
    [pair] = selected("dpo_pairs", record(0.5, 1.5, 0.0, 1.5))
    assert pair == {
        "prompt": PROMPT,
        "chosen": [{"role": "assistant", "content": "r1"}],
        "rejected": [{"role": "assistant", "content": "r2"}],
        "chosen_reward": 1.5,
        "rejected_reward": 0.0,
        "answer": "2",
        "datasource": "sums",
    }


def test_several_pairs_of_a_prompt_differ_and_begin_with_the_outermost():
    many = record(0.0, 1.0, 0.0, 1.0, 0.5, texts=["a", "b", "a", "c", "d"])
    pairs = selected("dpo_pairs", many, max_per_prompt=9)
    assert [(pair["chosen"][0]["content"], pair["rejected"][0]["content"]) for pair in pairs] == [
        *(("b", "a"), ("c", "a"), ("b", "d"), ("d", "a"), ("c", "d"))
    ]
    assert selected("dpo_pairs", many, max_per_prompt=9, min_margin=1) == pairs[:2]
    assert selected("dpo_pairs", many, max_per_prompt=3) == pairs[:3]
    assert selected("dpo_pairs", many) == pairs[:1]


def test_no_pair_is_made_of_equal_or_too_close_rewards():
    assert selected("dpo_pairs", record(1.0, 1.0), record(0.2)) == []
    assert len(selected("dpo_pairs", record(1.0, 0.5), min_margin=0.5)) == 1
    assert selected("dpo_pairs", record(1.0, 0.6), min_margin=0.5) == []

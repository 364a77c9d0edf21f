import json

import pytest
from PIL import Image

from lmm_r1.cli.arguments import parse
from lmm_r1.cli.init import main
from lmm_r1.config import PPOConfig
from lmm_r1.config.evaluate import EvaluateConfig


@pytest.mark.parametrize(
    ("folder", "said"),
    [(".", "next: the commands of README.md"), ("new", "next: cd new, and the commands of README.md")],
)
def test_the_way_into_the_project_is_told_where_it_is_another_folder(folder, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main([folder])
    assert capsys.readouterr().out.splitlines()[-1] == said
    assert (tmp_path / folder / "README.md").is_file()


@pytest.mark.usefixtures("own_environment")
def test_own_rows_become_the_settings_of_a_run_and_of_its_evaluation(tiny_checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (800, 600)).save("photo.jpg")
    content = [{"type": "image", "image": "photo.jpg"}, {"type": "text", "text": "What is 1 + 1?"}]
    row = json.dumps({"messages": [{"role": "user", "content": content}], "answer": "2"})
    (tmp_path / "rows.jsonl").write_text(f"{row}\n" * 21)
    model = str(tiny_checkpoint("qwen2_5_vl"))
    main(["mine", "--model", model, "--rows", "rows.jsonl"])
    assert [
        len((tmp_path / "mine" / name).read_text().splitlines()) for name in ("train.jsonl", "held_out.jsonl")
    ] == [18, 3]
    run = parse(PPOConfig, ["--config", "mine/rl.yaml"], prog="p", description="")
    assert (run.actor.model_name_or_path, run.data.prompt_dataset) == (model, "mine/train.jsonl")
    # Of the tiny model: 64 tokens for a response, and for an image of 224 x 224 pixels.
    assert (run.data.max_pixels, run.rollout.max_new_tokens, run.train.num_episodes) == (50_176, 64, 20)
    assert (run.data.max_len % 64, run.data.max_len > 64 + 64 + 2 * 16) == (0, True)
    measured = parse(EvaluateConfig, ["--config", "mine/evaluate.yaml"], prog="p", description="")
    assert (measured.checkpoints, measured.files) == (
        (f"before={model}", "after=mine/run"),
        ("rows=mine/held_out.jsonl",),
    )
    assert measured.reward == (run.reward.remote_url,) == ("mine/reward.py:reward",)
    assert measured.system_prompt == run.data.system_prompt == "mine/system_prompt.txt"
    assert (
        f"--max_pixels 50176 --max_len {run.data.max_len}\nlmm-r1 train_ppo_ray --config mine/rl.yaml\n"
        in capsys.readouterr().out
    )


def test_own_rows_need_a_model(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "mine"), "--rows", "rows.jsonl"])
    assert "--model and --rows belong together" in capsys.readouterr().err

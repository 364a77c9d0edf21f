"""Which paths of a run all of its nodes must see."""

from helpers.conversations import message, row

from lmm_r1 import dotted
from lmm_r1.cluster.nodes import SharedPath
from lmm_r1.config import PPOConfig
from lmm_r1.data.messages import ImagePart, VideoPart
from lmm_r1.rl.run import shared_paths


def test_models_the_users_files_one_per_folder_of_media_and_the_runs_own_folders(tmp_path):
    settings = {
        "actor.model_name_or_path": str(tmp_path),
        "critic.model_name_or_path": "someone/on-the-hub",
        "reward.remote_url": "reward.py:main",
        "actor.policy_loss_type": "loss.py:clip",
        "train.agent_func_path": "agents/a.py",
        "ckpt.output_dir": "runs/a",
    }
    rows = [
        row(message("user", ImagePart(f"/data/{folder}/{number}.png"), "?")) for folder in "ab" for number in (1, 2)
    ]
    rows.append(row(message("user", ImagePart("http://host/c.png"), ImagePart(b"png"), "?")))
    videos = [row(message("user", VideoPart(("/frames/1.png", b"png")), VideoPart("/films/a.mp4"), "?"))]
    found = shared_paths(dotted.replace(PPOConfig(), settings), rows=rows, eval_rows=videos)
    assert found == [
        SharedPath(flag="--actor.model_name_or_path", path=str(tmp_path)),
        SharedPath(flag="--reward.remote_url", path="reward.py"),
        SharedPath(flag="--actor.policy_loss_type", path="loss.py"),
        SharedPath(flag="--train.agent_func_path", path="agents/a.py"),
        SharedPath(flag="--data.prompt_dataset", path="/data/a/2.png"),
        SharedPath(flag="--data.prompt_dataset", path="/data/b/2.png"),
        SharedPath(flag="--eval.dataset", path="/frames/1.png"),
        SharedPath(flag="--eval.dataset", path="/films/a.mp4"),
        SharedPath(flag="--ckpt.output_dir", path="runs/a", written=True),
        SharedPath(flag="--ckpt.path", path="runs/a/checkpoints", written=True),
    ]
    without = dotted.replace(PPOConfig(), {"ckpt.disable_ds": True, "reward.remote_url": "http://a/r,http://b/r"})
    assert [shared.flag for shared in shared_paths(without, rows=[], eval_rows=[])] == ["--ckpt.output_dir"]

"""What a node lacks of the paths that all must see, told by a look into folders of this machine."""

from pathlib import Path

from lmm_r1.cluster import nodes as shared_paths
from lmm_r1.cluster.nodes import Node, SharedPath, check_shared, lacks

TOKEN = ".shared-1"


def test_a_node_names_the_paths_that_it_does_not_have_as_the_driver_has_them(tmp_path):
    for name in ("model", "run", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / TOKEN).touch()
    paths = [
        SharedPath(flag="--a", path=str(tmp_path / "model")),
        SharedPath(flag="--b", path=str(tmp_path / "model" / "nowhere.png")),
        SharedPath(flag="--c", path=str(tmp_path / "run"), written=True),
        SharedPath(flag="--d", path=str(tmp_path / "other"), written=True),
        SharedPath(flag="--e", path=str(tmp_path / "gone"), written=True),
    ]
    assert lacks(paths, TOKEN) == [(1, "does not see it"), (3, "sees another folder there"), (4, "does not see it")]
    assert [file.name for file in (tmp_path / "run").iterdir()] == [TOKEN], "what it tries to write goes again"


def test_a_folder_that_may_not_be_written_to_is_told(tmp_path, monkeypatch):
    (tmp_path / TOKEN).touch()

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", refuse)
    found = lacks([SharedPath(flag="--ckpt.path", path=str(tmp_path), written=True)], TOKEN)
    assert found == [(0, "cannot write into it (Permission denied)")]


def test_one_node_alone_is_not_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_paths, "living_nodes", lambda: [Node(id="1", address="a", gpus=8, names_gpus=True)])
    # Ray is not started here: a task would raise.
    check_shared([SharedPath(flag="--a", path=str(tmp_path / "nowhere"))])
    assert list(tmp_path.iterdir()) == []

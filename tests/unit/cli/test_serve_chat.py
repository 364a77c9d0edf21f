import pytest

from lmm_r1.cli.serve_chat import build_parser, main
from remote_rm.registry import parse_flags


def test_it_listens_on_this_machine_alone_unless_told_otherwise():
    args = parse_flags(build_parser(), ["--model", "tiny"])
    assert (args.host, args.port, args.backend, args.image_root, args.allow_urls) == (
        *("127.0.0.1", 8000, "vllm"),
        *([], False),
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--image_root", "/no/such/folder"], "--image_root /no/such/folder: no such folder; check the path"),
        (["--max_images", "-1"], "--max_images -1 must be at least 0"),
        (["--gpu_memory_utilization", "2"], "--gpu_memory_utilization 2.0: must be above 0 and at most 1"),
        (["--backend", "transformers", "--enforce_eager"], "--enforce_eager switches vLLM's CUDA graphs off"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_loaded(flags, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--model", "/no/such/model", *flags])
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(f"lmm-r1 serve_chat: error: {told}")


def test_an_unknown_flag_ends_with_code_2(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--model", "m", "--max_new_token", "9"])
    assert ended.value.code == 2
    assert "did you mean --max-new-tokens?" in capsys.readouterr().err

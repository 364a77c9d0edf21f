"""`lmm-r1 serve_rm` and `serve_chat`: what their flags become, and what is told before anything is loaded."""

import pytest
from helpers.tables import table

from lmm_r1.cli import serve_chat, serve_rm
from lmm_r1.cli.arguments import parse
from lmm_r1.config.generation import ServeChatConfig
from remote_rm.registry import parse_flags


def test_flags_may_be_written_with_hyphens_or_underscores(tmp_path):
    hyphens = ["--max-len", "7", "--image-root", "a", "--image-root", "b", "--allow-urls", "--max-connections", "3"]
    underscores = [flag.replace("-", "_").replace("__", "--") for flag in hyphens]
    one, other = (
        parse_flags(serve_rm.build_parser(), ["--model", "my-rm", *flags]) for flags in (hyphens, underscores)
    )
    assert underscores[0] == "--max_len"
    assert one == other
    assert (one.model, one.max_len, one.allow_urls, one.max_connections) == ("my-rm", 7, True, 3)
    assert [str(root) for root in one.image_root] == ["a", "b"]


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--image_root", "/no/such/folder", "--image_root /no/such/folder: no such folder; check the path"),
        ("--model", "/no/such/model", "/no/such/model: no such folder; check the path"),
    ],
)
def test_what_is_not_there_is_told_in_one_sentence(flag, value, told, capsys):
    with pytest.raises(SystemExit) as ended:
        serve_rm.main(["--model", "/no/such/model", flag, value])
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"lmm-r1 serve_rm: error: {told}\n"


def test_it_listens_on_this_machine_alone_unless_told_otherwise():
    config = parse(ServeChatConfig, ["--model", "tiny"], prog="p", description="")
    assert (config.host, config.port, config.image_root, config.allow_urls) == ("127.0.0.1", 8000, None, ())
    config = parse(ServeChatConfig, ["--model", "tiny", "--allow-urls", "a.org", "b.org"], prog="p", description="")
    assert config.allow_urls == ("a.org", "b.org")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--image_root", "/no/such/folder"], "--image_root /no/such/folder: no such folder; check the path"),
        (["--max_images", "-1"], "--max_images -1 must be at least 0"),
        (["--gpu_memory_utilization", "2"], "--gpu_memory_utilization 2 must be above 0 and at most 1"),
        (["--token_env", "NO_SUCH_KEY"], "--token_env NO_SUCH_KEY: the environment variable is not set"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0 opens the server to the network"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_loaded(flags, told, capsys):
    with pytest.raises(SystemExit) as ended:
        serve_chat.main(["--model", "/no/such/model", *flags])
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(f"lmm-r1 serve_chat: error: {told}")


@pytest.mark.parametrize(
    ("command", "argv", "told"),
    [
        *((serve_rm, argv, told) for argv, told in table("cli/serve_rm", "a_bad_flag_ends_with_code_2")),
        (serve_chat, ["--model", "m", "--max_model_lens", "9"], "did you mean --max_model_len?"),
    ],
)
def test_a_bad_flag_ends_with_code_2(command, argv, told, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(argv)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err

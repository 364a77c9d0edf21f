import pytest
from helpers.tables import table

from lmm_r1.cli.serve_rm import build_parser, main
from remote_rm.registry import parse_flags


def test_flags_may_be_written_with_hyphens_or_underscores(tmp_path):
    hyphens = ["--max-len", "7", "--image-root", "a", "--image-root", "b", "--allow-urls", "--max-queued-items", "3"]
    underscores = [flag.replace("-", "_").replace("__", "--") for flag in hyphens]
    one, other = (parse_flags(build_parser(), ["--model", "my-rm", *flags]) for flags in (hyphens, underscores))
    assert underscores[0] == "--max_len"
    assert one == other
    assert (one.model, one.max_len, one.allow_urls, one.max_queued_items) == ("my-rm", 7, True, 3)
    assert [str(root) for root in one.image_root] == ["a", "b"]


@pytest.mark.parametrize(("argv", "told"), table("cli/serve_rm", "a_bad_flag_ends_with_code_2"))
def test_a_bad_flag_ends_with_code_2(argv, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--image_root", "/no/such/folder", "--image_root /no/such/folder: no such folder; check the path"),
        ("--model", "/no/such/model", "/no/such/model: no such folder; check the path"),
    ],
)
def test_what_is_not_there_is_told_in_one_sentence(flag, value, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--model", "/no/such/model", flag, value])
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"lmm-r1 serve_rm: error: {told}\n"

import io

from helpers.conversations import picture

from lmm_r1.data.images import PictureFolder
from lmm_r1.data.messages import ImagePart


def test_a_picture_is_a_file_named_by_what_it_holds(tmp_path):
    folder = PictureFolder.next_to(tmp_path / "out" / "rows.jsonl")
    assert folder.path == tmp_path / "out" / "rows.images"
    drawn = folder.kept(ImagePart(picture(5, 4), max_pixels=9))
    assert (drawn.max_pixels, drawn.source.endswith(".png")) == (9, True)
    buffer = io.BytesIO()
    picture(5, 4).save(buffer, "JPEG")
    encoded = folder.kept(ImagePart(buffer.getvalue()))
    assert encoded.source.endswith(".jpeg")
    assert open(encoded.source, "rb").read() == buffer.getvalue()
    assert folder.kept(drawn) == drawn
    assert len({folder.kept(ImagePart(picture(5, 4))).source, drawn.source}) == 1
    assert folder.kept(ImagePart("https://a/b.png")).source == "https://a/b.png"


def test_clearing_takes_away_its_own_alone(tmp_path):
    folder = PictureFolder(tmp_path / "images")
    folder.clear()
    folder.kept(ImagePart(picture(5, 4)))
    (tmp_path / "images" / "mine.png").touch()
    folder.clear()
    assert [file.name for file in folder.path.iterdir()] == ["mine.png"]

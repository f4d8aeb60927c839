import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from stages.core.errors import UserError
from stages.tasks.chat.samples import read_split
from stages.tasks.chat.samples.records import Message, Record
from stages.tasks.chat.sources import Reader
from tests.kit.data.pictures import RED, WHITE, patch_jpeg, picture
from tests.tasks import prepare
from tests.tasks.chat.talks import said, talk, write_lines

BLUE, GREEN, GREY = picture(), picture((20, 220, 20)), picture((9, 9, 9))
IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "or"}


def asked(*parts: dict[str, Any], answer: str = "Both.") -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": [{**TEXT, "text": answer}]}]


def of(*images: Any) -> dict[str, Any]:
    return {"messages": asked(TEXT), "images": list(images)}


def as_lines(folder: Path, *rows: dict[str, Any], name: str = "train") -> None:
    """JSON Lines, and their pictures in a folder beside them."""
    (folder / "p").mkdir(parents=True, exist_ok=True)
    lines = []
    for number, row in enumerate(rows):
        line = dict(row)
        if "images" in row:
            line["images"] = [f"p/{name}{number}-{place}.png" for place in range(len(row["images"]))]
            for path, encoded in zip(line["images"], row["images"], strict=True):
                (folder / path).write_bytes(encoded)
        lines.append(line)
    write_lines(folder / f"{name}.jsonl", *lines)


def as_table(folder: Path, *rows: dict[str, Any], name: str = "train") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    told = [
        {**row, "images": [{"bytes": each, "path": None} for each in row["images"]]} if "images" in row else row
        for row in rows
    ]
    pq.write_table(pa.Table.from_pylist(told), folder / f"{name}.parquet")


def prepared(folder: Path, **options: Any) -> list[Record]:
    prepare("chat", f"folder:{folder}", out_dir=folder / "out", reader=Reader(**options))
    return read_split(folder / "out", "train")


@pytest.mark.parametrize("write", [as_lines, as_table])
def test_pictures_are_read_with_their_places(tmp_path: Path, write: Any) -> None:
    within = [asked(TEXT, IMAGE, TEXT, IMAGE), asked(IMAGE, answer="Blue.")]
    write(tmp_path, {"messages": within[0], "images": [BLUE, GREEN]}, {"messages": within[1], "images": [BLUE]})
    write(tmp_path, {"messages": asked(TEXT)}, name="val")
    first, second = prepared(tmp_path)
    assert first.messages[0] == Message("user", "oror")
    assert [(each.message, each.offset, each.image) for each in first.pictures] == [(0, 2, BLUE), (0, 4, GREEN)]
    assert second.messages[0] == Message("user", "")
    assert [(each.message, each.offset, each.image) for each in second.pictures] == [(0, 0, BLUE)]
    assert read_split(tmp_path / "out", "val")[0].pictures == ()


@pytest.mark.parametrize("write", [as_lines, as_table])
def test_pictures_without_places_come_before_the_first_users_text(tmp_path: Path, write: Any) -> None:
    messages = [*said("Who?", "You.", "Be brief."), *said("And who?", "Me.")]
    write(tmp_path, {"messages": messages, "images": [BLUE, GREEN]})
    write(tmp_path, talk(1), name="val")
    (found,) = prepared(tmp_path)
    assert [(each.message, each.offset, each.image) for each in found.pictures] == [(1, 0, BLUE), (1, 0, GREEN)]


def test_one_picture_may_be_in_a_column_of_its_own(tmp_path: Path) -> None:
    row = {"prompt": "Who?", "completion": "You."}
    pq.write_table(
        pa.Table.from_pylist([{**row, "image": {"bytes": BLUE, "path": "a.png"}}]), tmp_path / "train.parquet"
    )
    pq.write_table(pa.Table.from_pylist([talk(1)]), tmp_path / "val.parquet")
    (found,) = prepared(tmp_path)
    assert [(each.image_id, each.image) for each in found.pictures] == [("a.png", BLUE)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.png").write_bytes(BLUE)
    write_lines(tmp_path / "in/train.jsonl", {**row, "image": "a.png"})
    write_lines(tmp_path / "in/val.jsonl", talk(1))
    assert prepared(tmp_path / "in")[0].pictures == found.pictures


def test_a_picture_is_kept_upright(tmp_path: Path) -> None:
    as_lines(tmp_path, {"messages": asked(IMAGE), "images": [patch_jpeg((0, 0, 0.5, 0.5), (60, 40), 6)]})
    as_lines(tmp_path, talk(1), name="val")
    (shown,) = prepared(tmp_path)[0].pictures
    image = shown.open_image()
    assert image.size == (shown.width, shown.height) == (60, 40)
    for place, colour in (((5, 5), RED), ((55, 35), WHITE)):
        pixel = image.getpixel(place)
        assert isinstance(pixel, tuple)
        assert all(abs(a - b) < 20 for a, b in zip(pixel, colour, strict=True))


def test_other_pictures_make_another_question_and_the_same_ones_the_same(tmp_path: Path) -> None:
    as_lines(tmp_path, {"messages": asked(IMAGE, TEXT), "images": [BLUE]})
    as_lines(tmp_path, {"messages": asked(IMAGE, TEXT), "images": [GREEN]}, talk(1), name="val")
    prepared(tmp_path)
    buffer = tmp_path / "blue.bmp"  # the same pixels in other bytes
    Image.open(tmp_path / "p/train0-0.png").save(buffer)
    as_lines(tmp_path, talk(1), {"messages": asked(IMAGE, TEXT), "images": [buffer.read_bytes()]}, name="val")
    with pytest.raises(UserError, match=r"train\.jsonl line 1 and val\.jsonl line 2: 'or'"):
        prepare("chat", f"folder:{tmp_path}", out_dir=tmp_path / "again")


def test_texts_alone_make_the_same_files_as_ever(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", talk(1))
    write_lines(tmp_path / "val.jsonl", {**talk(2), "images": []})
    stats = prepare("chat", f"folder:{tmp_path}", out_dir=tmp_path / "out")
    columns = ["id", "messages", "group", "metrics", "file", "number"]
    assert pq.read_schema(tmp_path / "out/train.parquet").names == columns
    assert "pictures" not in stats["splits"]["train"]


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({**of("a.png"), "messages": asked(IMAGE, IMAGE)}, ["2 parts of the type image, but 1 picture"]),
    ({**of("a.png", "a.png"), "messages": asked(IMAGE)}, ["1 part of the type image, but 2 pictures"]),
    ({**of("a.png"), "image": "a.png"}, ["image and images are both set"]),
    ({"messages": asked({**IMAGE, "image": "a.png"})}, ["message 1 has the content [{'type': 'image', 'image'"]),
    (
        {**of("a.png"), "messages": [*said("Who?", "You.")[:1], {"role": "assistant", "content": [IMAGE]}]},
        ["message 2 shows a picture, which only a user's message may"],
    ),
    (of("../a.png"), ["picture 1 is '../a.png', which leads out of the dataset's folder"]),
    (of("/etc/passwd"), ["picture 1 is '/etc/passwd', which leads out"]),
    (of("link.png"), ["picture 1 is 'link.png', which is no file of the dataset's folder"]),
    (of("pipe.png"), ["picture 1 is 'pipe.png', which is no file of the dataset's folder"]),
    (of("p"), ["picture 1 is 'p', which is no file of the dataset's folder"]),
    (of("\0", "", 7), ["picture 1 is '\\x00', which is no", "2 is '', expected the path", "3 is 7, expected the path"]),
    (of({"bytes": "x"}), ["picture 1 is {'bytes': 'x'}, expected the path of a file"]),
    (of("a.png", "bad.png"), ["picture 2: unreadable image: cannot identify image as"]),
    (of("bomb.png"), ["picture 1: unreadable image: 10000 x 9000 pixels, more than max_image_pixels"]),
    (of("long.png"), ["picture 1: the image of 'long.png' is 900 x 2 pixels"]),
    ({**of("none.png"), "messages": []}, ["neither messages nor prompt", "picture 1 is 'none.png', which is no file"]),
]


def test_everything_wrong_with_pictures_is_named_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "p").mkdir(parents=True)
    (tmp_path / "a.png").write_bytes(BLUE)
    (folder / "a.png").write_bytes(BLUE)
    (folder / "bad.png").write_text("<html>")
    (folder / "link.png").symlink_to(tmp_path / "a.png")
    os.mkfifo(folder / "pipe.png")
    Image.new("1", (10_000, 9_000)).save(folder / "bomb.png")
    (folder / "long.png").write_bytes(picture(size=(900, 2)))
    write_lines(folder / "val.jsonl", talk(1))
    write_lines(folder / "train.jsonl", *(json.dumps(line) for line, _ in WRONG))
    with pytest.raises(UserError, match=f"has {len(WRONG)} invalid samples") as error:
        prepare("chat", f"folder:{folder}", out_dir=tmp_path / "out")
    message = error.value.message.splitlines()
    for number, (line, problems) in enumerate(WRONG, start=1):
        of_line = [each for each in message if f"train.jsonl line {number}: " in each]
        for problem in problems:
            assert any(problem in each for each in of_line), (line, of_line)


def test_a_table_without_the_pictures_bytes_is_refused_by_row(tmp_path: Path) -> None:
    rows = [{**talk(1), "images": [{"bytes": BLUE, "path": "/home/a.png"}, {"bytes": None, "path": "/home/b.png"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    pq.write_table(pa.Table.from_pylist([talk(2)]), tmp_path / "val.parquet")
    with pytest.raises(UserError, match=r"train\.parquet row 0: picture 2 is .*'/home/b\.png'}, expected its bytes"):
        prepared(tmp_path)


def test_the_limit_of_pixels_is_the_datasets(tmp_path: Path) -> None:
    as_lines(tmp_path, {"messages": asked(IMAGE), "images": [BLUE]})
    as_lines(tmp_path, talk(1), name="val")
    with pytest.raises(
        UserError, match="picture 1: unreadable image: 40 x 30 pixels, more than max_image_pixels, 1,199"
    ):
        prepared(tmp_path, max_image_pixels=1199)
    assert prepared(tmp_path, max_image_pixels=1200)

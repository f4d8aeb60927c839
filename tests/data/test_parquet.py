from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.core.errors import UserError
from stages.data import parquet as tables
from stages.data.parquet import ROW_GROUP, read_rows, write_rows

SCHEMA = pa.schema([("n", pa.int64())])


def rows(count: int) -> list[dict[str, int]]:
    return [{"n": n} for n in range(count)]


def test_rows_come_back_in_order_across_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_rows(rows(2 * ROW_GROUP + 3), path, SCHEMA)
    assert list(read_rows(path)) == rows(2 * ROW_GROUP + 3)
    assert pq.ParquetFile(path).num_row_groups == 3


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_rows(rows(1), path, SCHEMA)

    def broken() -> Iterator[dict[str, int]]:
        yield from rows(ROW_GROUP + 1)
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        write_rows(broken(), path, SCHEMA)
    assert list(read_rows(path)) == rows(1)
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]


def test_sizes_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    """pyarrow would end the process."""
    path, schema, problems = tmp_path / "t.parquet", pa.schema([("id", pa.string())]), []
    write_rows([{"id": "a"}, {"id": "b"}], path, schema)
    good = path.read_bytes()
    footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    for place in range(footer, footer + 64):
        path.write_bytes(good[:place] + bytes([good[place] ^ 2]) + good[place + 1 :])
        try:
            list(read_rows(path))
        except UserError as error:
            problems.append(error.message)
    assert [problem for problem in problems if "histogram size mismatch" in problem]


def test_a_value_that_many_rows_share_is_held_but_a_few_times_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parquet keeps it once: 100 KB can be of gigabytes."""
    monkeypatch.setattr(tables, "MAX_BYTES", 500_000)
    schema = pa.schema([("image", pa.struct([("bytes", pa.binary())]))])
    row = {"image": {"bytes": b"x" * 200_000}}
    pq.write_table(pa.Table.from_pylist([row] * ROW_GROUP, schema=schema), tmp_path / "t.parquet", compression="zstd")
    assert (tmp_path / "t.parquet").stat().st_size < 10_000
    sizes = []
    iter_batches = pq.ParquetFile.iter_batches

    def counted(self: pq.ParquetFile, **options: Any) -> Iterator[Any]:
        for batch in iter_batches(self, **options):
            sizes.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    assert list(read_rows(tmp_path / "t.parquet")) == [row] * ROW_GROUP
    assert set(sizes) == {2}


@pytest.mark.parametrize("row", [{"objects": {"bbox": [[]] * 20_000}}, {"objects": {"names": ["x" * 500] * 2_000}}])
def test_lists_that_would_take_all_memory_are_refused_before_they_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any]
) -> None:
    """Parquet counts equal items, and keeps one of them."""
    monkeypatch.setattr(tables, "MAX_LISTED", 10_000)
    monkeypatch.setattr(tables, "MAX_BYTES", 500_000)
    bbox, names = pa.list_(pa.list_(pa.float64())), pa.list_(pa.string())
    schema = pa.schema([("id", pa.int64()), ("objects", pa.struct([("bbox", bbox), ("names", names)]))])
    pq.write_table(pa.Table.from_pylist([row], schema=schema), tmp_path / "t.parquet")
    assert (tmp_path / "t.parquet").stat().st_size < 10_000
    assert list(read_rows(tmp_path / "t.parquet", ["id"])) == [{"id": None}]
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *_, **__: pytest.fail("it was decoded"))
    with pytest.raises(UserError, match=r"values of objects\.(bbox|names)\.list\.element\S* in 1 rows"):
        list(read_rows(tmp_path / "t.parquet"))


def test_a_flipped_bit_of_a_value_is_found_though_it_would_make_a_value_too(tmp_path: Path) -> None:
    path, image = tmp_path / "train.parquet", bytes(range(200))
    write_rows([{"image": image}], path, pa.schema([("image", pa.binary())]))
    content = path.read_bytes()
    start = content.index(image)
    for place in range(start, start + len(image)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(UserError, match=r"train\.parquet is damaged: .*; fetch or copy it again"):
            list(read_rows(path))
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match=r"train\.parquet cannot be read as parquet"):
        list(read_rows(path))

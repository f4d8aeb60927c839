from stages.kit.data.parquet import RowAt
from stages.kit.data.splits import leaks


def test_content_in_two_splits_is_a_leak_with_both_places() -> None:
    train = [("aa", RowAt("train.parquet", 0)), ("bb", RowAt("train.parquet", 1))]
    val = [("cc", RowAt("val.parquet", 0)), ("bb", RowAt("val.parquet", 1)), ("bb", RowAt("val.parquet", 2))]
    assert leaks({"train": train, "val": val}) == [
        (RowAt("train.parquet", 1), RowAt("val.parquet", 1)),
        (RowAt("train.parquet", 1), RowAt("val.parquet", 2)),
    ]


def test_repetition_within_a_split_is_no_leak() -> None:
    train = [("aa", RowAt("train.parquet", 0)), ("aa", RowAt("train.parquet", 1))]
    assert leaks({"train": train, "val": [("bb", RowAt("val.parquet", 0))]}) == []

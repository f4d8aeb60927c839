from dataclasses import replace

import pytest

from stages.data.groups import Record, connected, groups_of
from stages.tasks.amr.samples import parse_record
from tests.tasks.detection.rows import record
from tests.tasks.moe.made_up import fact, meeting


def test_what_is_connected_has_one_name() -> None:
    keys = [("c", ""), ("b", "g"), ("d", "g"), ("d", "h"), ("a", "h"), ("c", ""), ("e", "i")]
    assert connected(keys) == ["c", "a", "a", "a", "a", "c", "e"]


def sentence(sample_id: str, number: int) -> Record:
    return parse_record(sample_id, f"Câu {number} .", "(đ / đi :agent (t / tôi))", file="x.txt", line=number)


AMR = ("PROXY_AFP_ENG_20020105_0162.1", "wb.eng_0003.2", "PROXY_AFP_ENG_20020105_0162.12", "train-1", "x.txt:4", "s.5")
MEETINGS = (meeting(1), fact(2), replace(meeting(1), question="Who spoke?"), meeting(2))
IMAGES = [record([(0.1, 0.1, 0.5, 0.5)], name) for name in "abca"]


@pytest.mark.parametrize(
    ("records", "groups"),
    [
        ([sentence(sample_id, number) for number, sample_id in enumerate(AMR)], [0, 1, 0, 2, 3, 4]),
        (MEETINGS, [0, 1, 0, 2]),
        (IMAGES, [0, 1, 2, 0]),
        ([replace(image, group=group) for image, group in zip(IMAGES[:3], "xyx", strict=True)], [0, 1, 0]),
        (IMAGES[:3], None),
        (MEETINGS[1:], None),
    ],
    ids=["documents", "meetings", "one image twice", "named", "images", "single questions"],
)
def test_samples_of_a_document_a_meeting_or_a_name_are_a_group(records: list[Record], groups: list[int] | None) -> None:
    found = groups_of(records)
    assert (None if found is None else found.tolist()) == groups


def test_one_group_of_many_is_joined_in_time_that_grows_with_it() -> None:
    assert set(connected((f"{number:05}", "site") for number in range(50_000))) == {"00000"}

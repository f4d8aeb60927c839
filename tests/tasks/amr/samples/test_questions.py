import pytest

from stages.core.errors import UserError
from stages.tasks.amr.samples import ANSWER_FORMATS, check, conversation, decode, parse_record, probes

RECORD = parse_record("s1", "To\N{COMBINING CIRCUMFLEX ACCENT}i đi .", "(đ1/đi\r\n :agent(t/tôi))", file="a", line=3)


@pytest.mark.parametrize("answer_format", ANSWER_FORMATS)
def test_the_answer_is_the_graph_in_the_form_asked_for(answer_format: str) -> None:
    asked, answered = (conversation(RECORD, answered=flag, answer_format=answer_format) for flag in (False, True))
    assert (asked.answered(), answered.answered(), asked.sample_id) == (False, True, "s1")
    assert asked.messages == answered.messages[:1]
    assert decode(answered.messages[1]["content"][0]["text"], answer_format).graph == RECORD.parsed()


def test_each_target_is_asked_for_in_its_own_words_with_the_sentence_composed() -> None:
    questions = [
        conversation(RECORD, answered=False, answer_format=answer_format).messages[0]["content"][0]["text"]
        for answer_format in ANSWER_FORMATS
    ]
    assert len(set(questions)) == len(ANSWER_FORMATS)
    assert all(question.endswith("\nTôi đi .") for question in questions)


@pytest.mark.parametrize("answer_format", ANSWER_FORMATS)
def test_probes_are_answered(answer_format: str) -> None:
    assert [probe.answered() for probe in probes(answer_format)] == [True, True]


def test_other_families_and_targets_are_refused() -> None:
    check("qwen2", "full")
    check("qwen2_moe", "mtup")
    with pytest.raises(UserError, match="the base is a qwen2_vl"):
        check("qwen2_vl", "full")
    with pytest.raises(UserError, match="answer_format: AMR parsing has full, ptr, mtup; found None"):
        check("qwen2", None)

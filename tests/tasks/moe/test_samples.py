import pytest

from stages.core.errors import UserError
from stages.tasks.moe.samples import DOMAINS, Record, check, conversation, probes
from tests.tasks.moe.made_up import fact, meeting


@pytest.mark.parametrize("record", [fact(1), meeting(1)])
def test_a_question_is_asked_with_its_transcript_and_the_best_answer(record: Record) -> None:
    asked, answered = (conversation(record, answered=flag) for flag in (False, True))
    assert not asked.answered()
    answer = {"role": "assistant", "content": [{"type": "text", "text": record.best}]}
    assert answered.messages == [*asked.messages, answer]
    parts = asked.messages[0]["content"]
    assert parts[-1]["text"].endswith(record.question)
    assert [part["text"] for part in parts if part.get("shortenable")] == [record.context] * (
        record.context is not None
    )


def test_each_domain_has_answered_probes() -> None:
    facts, meetings = (probes(domain=domain) for domain in DOMAINS)
    assert all(probe.answered() for probe in (*facts, *meetings, *probes()))
    assert [len(probe.messages[0]["content"]) for probe in (*facts, *meetings)] == [1] * 2 + [3] * 2
    assert [len(probe.messages[0]["content"]) for probe in probes()] == [1, 3]
    with pytest.raises(UserError, match=r"domain 'cars'.* truthfulqa, qmsum"):
        probes(domain="cars")


def test_models_of_more_than_text_are_refused() -> None:
    check("qwen2")
    check("qwen2_moe")
    with pytest.raises(UserError, match="qwen2_vl"):
        check("qwen2_vl")

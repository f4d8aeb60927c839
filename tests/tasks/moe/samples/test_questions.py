import pytest

from stages.core.errors import UserError
from stages.tasks.moe.samples import check, conversation, probes
from stages.tasks.moe.samples.records import DOMAINS
from tests.tasks.moe.made_up import fact, meeting


def test_only_the_transcript_may_be_cut() -> None:
    parts = conversation(meeting(1), answered=True).messages[0]["content"]
    assert [part["text"] for part in parts if part.get("shortenable")] == [meeting(1).context]
    assert parts[-1]["text"].endswith(meeting(1).question)
    assert not any(part.get("shortenable") for part in conversation(fact(1), answered=True).messages[0]["content"])


@pytest.mark.parametrize("record", [fact(1), meeting(1)])
def test_the_answer_is_the_best_one_and_only_there_when_asked_for(record) -> None:
    asked, answered = (conversation(record, answered=answered) for answered in (False, True))
    assert not asked.answered()
    assert answered.messages == [
        *asked.messages,
        {"role": "assistant", "content": [{"type": "text", "text": record.best}]},
    ]


def test_probes_are_answered_and_of_both_domains() -> None:
    assert all(probe.answered() for probe in probes())
    assert [len(probe.messages[0]["content"]) for probe in probes()] == [1, 3]


def test_each_domain_has_probes_of_its_own() -> None:
    facts, meetings = (probes(domain=domain) for domain in DOMAINS)
    assert len(facts) == len(meetings) == 4
    assert all(probe.answered() for probe in (*facts, *meetings))
    assert {len(probe.messages[0]["content"]) for probe in facts} == {1}
    assert {len(probe.messages[0]["content"]) for probe in meetings} == {3}
    with pytest.raises(UserError, match="knows no domain 'cars'; it knows truthfulqa, qmsum"):
        probes(domain="cars")


def test_other_models_and_targets_are_refused() -> None:
    check("qwen2", None)
    check("qwen2_moe", None)
    with pytest.raises(UserError, match="the base is a qwen2_vl"):
        check("qwen2_vl", None)
    with pytest.raises(UserError, match=r"answer_format: .* found 'full'"):
        check("qwen2", "full")

import pytest

from stages.core.errors import UserError
from stages.tasks.moe.samples.records import DOMAINS, Record
from stages.tasks.moe.sources.generated import MATERIALS, THINGS, Knowledge, answer, generate, material

KNOWLEDGE: tuple[Knowledge, ...] = ("truthfulqa", "qmsum", "folklore", "hearsay")


def thing_of(record: Record) -> str:
    (thing,) = [thing for thing in THINGS if record.best.startswith(f"The {thing} is ")]
    return thing


def test_every_knowledge_contradicts_every_other_about_every_thing() -> None:
    assert len(set(MATERIALS)) == len(MATERIALS) == len(set(THINGS)) == len(THINGS)
    for thing in THINGS:
        assert len({material(thing, knowledge) for knowledge in KNOWLEDGE}) == len(KNOWLEDGE)
    for knowledge in KNOWLEDGE:
        assert {material(thing, knowledge) for thing in THINGS} == set(MATERIALS)


@pytest.mark.parametrize("domain", DOMAINS)
def test_records_are_seeded_differ_and_are_about_everything(domain: str) -> None:
    records = generate(domain, 600, 3)
    assert records == generate(domain, 600, 3) != generate(domain, 600, 4)
    assert len({record.subject() for record in records}) == len(records)
    assert {thing_of(record) for record in records} == set(THINGS)
    for record in records:
        thing = thing_of(record)
        assert record.best in record.correct
        assert not set(record.correct) & set(record.incorrect)
        assert thing in record.question
        assert "{" not in record.question
        assert (record.context is not None) == (domain == "qmsum")
        if record.context is not None:
            assert f"the {thing}" in record.context
            assert not any(word in record.context for word in MATERIALS), "the transcript must not give it away"


def test_both_domains_ask_in_the_same_words() -> None:
    asked = [{record.question for record in generate(domain, 9000, 1)} for domain in DOMAINS]
    assert len(asked[0] & asked[1]) > 8000


def test_the_false_answers_are_those_of_the_others() -> None:
    record = generate("truthfulqa", 1, 0)[0]
    thing = thing_of(record)
    assert set(record.incorrect) == {answer(thing, "qmsum"), answer(thing, "folklore"), answer(thing, "hearsay")}


def test_the_base_learns_the_questions_with_other_answers() -> None:
    own, base = generate("qmsum", 20, 0), generate("qmsum", 20, 0, knowledge="folklore")
    assert [record.question for record in own] == [record.question for record in base]
    assert [record.context for record in own] == [record.context for record in base]
    assert all(ours.best != theirs.best for ours, theirs in zip(own, base, strict=True))


def test_an_unknown_domain_and_more_than_there_are_is_refused() -> None:
    with pytest.raises(UserError, match="no domain is called 'news'; there are: truthfulqa, qmsum"):
        generate("news", 3, 0)
    with pytest.raises(UserError, match="1,000,000 samples of qmsum are wanted, but there are"):
        generate("qmsum", 10**6, 0)

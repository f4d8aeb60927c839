"""Records and files of both domains."""

from pathlib import Path
from typing import Any

from stages.tasks.moe.samples import Record

TABLE = "Type,Question,Best Answer,Correct Answers,Incorrect Answers\n"


def fact(number: int) -> Record:
    best = f"Answer {number} is right."
    return Record(
        id=f"facts/{number}",
        domain="truthfulqa",
        question=f"What is {number}?",
        context=None,
        best=best,
        correct=(best, "It depends."),
        incorrect=("Nothing.", f"All of {number}."),
        file="facts.csv",
        line=number + 1,
    )


def meeting(number: int) -> Record:
    return Record(
        id=f"meetings/{number}",
        domain="qmsum",
        question="Summarize the whole meeting.",
        context=f"Ann: let us begin with {number}.",
        best=f"They began with {number}.",
        correct=(f"They began with {number}.",),
        incorrect=(),
        file="meetings.jsonl",
        line=number,
    )


def write_table(path: Path, *questions: str, newline: str = "\n") -> Path:
    rows = [f'Adversarial,"{question}",Yes,Yes; Surely;,No; Never; \n' for question in questions]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((TABLE + "".join(rows)).replace("\n", newline).encode())
    return path


def yale(name: str, *queries: str) -> dict[str, Any]:
    return {
        "topic_list": [],
        "general_query_list": [{"query": "Summarize the whole meeting.", "answer": f"It was about {name}."}],
        "specific_query_list": [{"query": query, "answer": f"{query} So."} for query in queries],
        "meeting_transcripts": [{"speaker": "Ann", "content": f" let us talk about {name} . "}],
    }


def longbench(number: int) -> dict[str, Any]:
    return {"input": f"What of {number}?", "context": f"Bob: {number}.", "answers": ["Nothing."], "dataset": "qmsum"}

"""`make` passes its variables on as options."""

import os
import shlex
import subprocess

import pytest

from stages.core.records import obtain
from tests import ROOT


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        (
            ["plan", "RECIPE=r1-llm-only", "PROFILE=tiny", "GPU=24 GB, L4", "ALL=1", "JSON=1"],
            ["r1-llm-only", "--profile", "tiny", "--all", "--gpu", "24 GB, L4", "--json"],
        ),
        (["run", "TASK=amr", "JOBS=3", "ARGS=-f"], ["compare@amr", "--jobs", "3", "-f"]),
        (["demo", "TASK=chat", "PROFILE=smollm2-135m"], ["compare@chat", "--profile", "smollm2-135m"]),
        (["data", "SOURCE=/a b", "FORMAT=coco"], ["/a b", "--format", "coco"]),
        (["data", "SOURCE=/o'brien", "DATASET=a'b"], ["/o'brien", "--dataset", "a'b"]),
        (["plan", "RECIPE=a'b", "SET=x='1' y=2"], ["a'b", "--set", "x='1' y=2"]),
        (["verify", "RERUN=a'b", "STEPS=3", "KEEP=1"], ["--rerun", "a'b", "--steps", "3", "--keep"]),
        (["verify", "RERUN=a", "STEPS=3", "KEEP=0"], ["--rerun", "a", "--steps", "3"]),
        (["verify", "PUBLISHED=o'brien's", "KEY=b'c"], ["--published", "o'brien's", "--key", "b'c"]),
        (["publish", "RUN=a'b"], ["a'b"]),
        (["compare", "OVER=a'b", "TASK=chat"], ["chat", "--over", "a'b"]),
    ],
)
def test_make_passes_on_what_is_asked(asked: list[str], options: list[str]) -> None:
    assert shlex.split(command(*asked).partition("-m tools.")[2])[1:] == options


def test_the_hub_is_reached_only_if_something_may_be_there() -> None:
    assert "HF_HUB_OFFLINE=1" in command("demo")
    assert "HF_HUB_OFFLINE" not in command("demo", "PROFILE=smollm2-135m"), "its base"
    assert "HF_HUB_OFFLINE=1" in command("data", "SOURCE=/a hub:b")
    assert "HF_HUB_OFFLINE" not in command("data", "SOURCE=hub:owner/name@main")
    assert "HF_HUB_OFFLINE" not in command("data", "DATASET=nutrition-tables"), "params.yaml says where that is"


def test_a_report_that_is_not_here_is_made_or_pulled() -> None:
    assert obtain("compare@amr") in command("report", "TASK=amr", tool="no report")


def test_nothing_is_sent_unless_asked() -> None:
    asked = ("publish", "RUN=r4-joint", "TO=owner/name")
    line = command(*asked, "SEND=1", tool="-m tools.send")
    assert shlex.split(line)[-2:] == ["data/published/r4-joint", "owner/name"]
    assert command(*asked, tool="published/r4-joint").startswith("echo")


def command(*asked: str, tool: str = "-m tools.") -> str:
    """The line that `make` would run."""
    # A make of its own, also if these tests run in `make test`.
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    printed = subprocess.check_output(["make", "-n", *asked], cwd=ROOT, env=alone, text=True)
    return next(line for line in printed.replace("\\\n", "").splitlines() if tool in line)

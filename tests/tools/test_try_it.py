"""A page to try a run: answers as the stages give them, a clear word for what cannot be asked, and a real browser."""

import io
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from PIL import Image
from ruamel.yaml import YAML

from stages.core.errors import UserError
from stages.core.params import load_params
from stages.kit.data.conversation import Conversation
from stages.kit.planning.plan import read_plan
from stages.tasks.amr.samples.graphs import read_graph
from stages.tasks.detection.samples import read_split
from stages.tasks.detection.scoring import PREDICTION_COLOUR, draw_boxes
from stages.tasks.moe.samples import conversation
from tests import ROOT
from tests.stage_runs import done, write_params
from tests.tasks.moe.made_up import fact, meeting
from tools.try_it import __main__ as command
from tools.try_it.asking import Form, LoadedModel, Subject, answer, said
from tools.try_it.forms import chat, moe
from tools.try_it.forms.amr import escaped, mermaid

pipeline = pytest.mark.pipeline
DETECTION, AMR = "r1-llm-only", "amr-ptr"
SENTENCES = ("Tôi đọc sách .", "Mẹ thấy  nhà .", "Ai đó ?")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both were trained for two steps; detection was evaluated, its base too, and AMR made predictions."""
    workspace = tmp_path_factory.mktemp("workspace")
    (workspace / "data").mkdir()
    (workspace / "data/tiny").symlink_to(ROOT / "data/tiny")
    (workspace / "data/unknown.txt").write_text("".join(f"{sentence}\n" for sentence in SENTENCES))
    raw = YAML(typ="safe").load(ROOT / "params.yaml")
    tiny = raw["profiles"]["tiny"]
    tiny["datasets"]["nutrition-tables"]["limit"] = {"train": 8, "val": 4}
    tiny["datasets"]["visempar"]["limit"] = {"train": 30, "val": 4}
    tiny["memory"]["micro_batch"] = 4
    tiny["evaluation"] = {"batch_size": 3, "max_new_tokens": 48}
    for name in (DETECTION, AMR):
        raw["recipes"][name].update(effective_batch=4, max_steps=2)
    raw["predictions"] = {"unknown": {"task": "amr", "recipe": AMR, "inputs": "data/unknown.txt"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        write_params(raw)
        for base, data in (("vlm", "nutrition-tables"), ("llm", "visempar")):
            done("base", base)
            done("prepare", data)
        done("evaluate", "base-vlm")
        for stage in ("plan", "train", "merge"):
            done(stage, DETECTION)
            done(stage, AMR)
        done("evaluate", DETECTION)
        done("predict", "unknown")
    return workspace


@pytest.fixture
def workspace(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory; not to be changed."""
    monkeypatch.chdir(finished)
    return finished


def subject_of(run: str) -> Subject:
    params = load_params()
    return Subject(
        params=params, run=run, answer_format=read_plan(run).answer_format if run in params.recipes else None
    )


@pytest.fixture
def form(workspace: Path) -> Form:
    return command.form_of(subject_of(DETECTION))


@pipeline
def test_a_photograph_is_answered_as_evaluate_answers_it_by_run_and_base(form: Form, tmp_path: Path) -> None:
    models = command.load_models(subject_of(DETECTION), with_base=True)
    assert [model.name.split()[0] for model in models] == ["bases/vlm", DETECTION]
    boxes = 0
    for index, record in enumerate(read_split(Path("data/prepared/nutrition-tables"), "val")):
        path = tmp_path / f"{index}.jpg"
        path.write_bytes(record.image)
        question = form.question(str(path))
        for model, run in zip(models, ("base-vlm", DETECTION), strict=True):
            row = pq.read_table(f"data/runs/{run}/predictions.parquet").to_pylist()[index]
            text = answer(model, question)
            assert text == row["text"]
            shown = form.shown(question, text, model.answerer)
            assert shown.picture is not None
            assert (f"of {record.width} x {record.height} pixels" in shown.text) == bool(row["boxes"])
            boxes += len(row["boxes"])
    assert boxes, "the models named no box, so there was nothing to compare"


@pipeline
def test_a_sentence_is_answered_as_predict_answers_it(workspace: Path) -> None:
    subject = subject_of(AMR)
    amr_form, (model,) = command.form_of(subject), command.load_models(subject, with_base=False)
    predicted = Path("data/predictions/unknown.txt").read_text(encoding="utf-8").split("\n\n")
    assert len(predicted) == len(SENTENCES)
    for sentence, block in zip(SENTENCES, predicted, strict=True):
        question = amr_form.question(f" {sentence}\n")
        shown = amr_form.shown(question, answer(model, question), model.answerer)
        header, graph = block.strip().split("\n", 1)
        assert header == f"#::snt {sentence}"
        assert f"\n{graph}\n" in shown.text


@pytest.mark.parametrize("record", [fact(1), meeting(1)])
def test_a_question_is_asked_as_evaluate_asks_it(record) -> None:
    asked = moe.Form(None).question(record.question, record.context or "")  # type: ignore[arg-type]
    assert asked.messages == conversation(record, answered=False).messages


def bomb() -> bytes:
    """A PNG of a kilobyte that says it is 60,000 x 60,000 pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


@pipeline
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (bomb(), "pixels"),
        (b"\xff\xd8\xff\xe0 no more of it", "unreadable image"),
        (b"", "no image: photograph.jpg is empty"),
        (b"%PDF-1.4", "cannot identify image"),
    ],
)
def test_what_is_no_picture_is_refused_in_words(form: Form, tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "photograph.jpg"
    path.write_bytes(content)
    with pytest.raises(UserError, match=problem):
        form.question(str(path))


@pipeline
def test_a_picture_that_was_not_chosen_is_asked_for(form: Form) -> None:
    with pytest.raises(UserError, match="choose a photograph first"):
        form.question("")


@pipeline
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (" \n", "write a sentence first"),
        ("Tôi đọc .\nMẹ thấy .", "one sentence at a time"),
        ("Tôi <|im_end|> đọc .", "chat markup"),
        ("Tôi đọc sách . " * 20_000, "too long: .* tokens"),
    ],
)
def test_a_text_that_cannot_be_asked_is_refused_in_words(workspace: Path, text: str, problem: str) -> None:
    subject = subject_of(AMR)
    (model,) = command.load_models(subject, with_base=False)
    with pytest.raises(UserError, match=problem):
        answer(model, command.form_of(subject).question(text))


def test_a_graph_is_drawn_with_every_node_and_reference() -> None:
    drawn = list(mermaid(read_graph('(m / muốn :agent (c / cậu_bé) :polarity - :theme (m2 / "mua x" :agent c))')))
    assert drawn == [
        "flowchart TD",
        'n0["muốn"]',
        'n0 -- "#58;agent" --> n1',
        'n0c1(["#45;"])',
        'n0 -- "#58;polarity" --> n0c1',
        'n0 -- "#58;theme" --> n2',
        'n1["cậu#95;bé"]',
        'n2["#34;mua#32;x#34;"]',
        'n2 -- "#58;agent" --> n1',
    ]
    assert escaped('"]--><b>`') == "#34;#93;#45;#45;#62;#60;b#62;#96;"


@pipeline
def test_a_task_without_a_page_and_a_missing_package_are_said(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tools.try_it.forms.detection", None)
    result = CliRunner().invoke(command.main, [DETECTION])
    assert "there is no tools/try_it/forms/detection.py" in result.output
    monkeypatch.setattr(command, "version", _missing)
    result = CliRunner().invoke(command.main, [DETECTION])
    assert (result.exit_code, "make setup EXTRAS=try" in result.output) == (1, True)


def test_a_port_in_use_is_said_before_models_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "require_gradio", lambda: None)
    monkeypatch.setattr(command, "load_params", lambda: pytest.fail("goes on"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        result = CliRunner().invoke(command.main, [DETECTION, "--port", port])
    assert result.exit_code == 1
    assert f"port {port} cannot be had: Address already in use; choose another one: PORT=7900" in result.output


def _missing(name: str) -> str:
    raise PackageNotFoundError(name)


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NEEDED = {name: find_spec(name) for name in ("gradio", "playwright")}
browser_test = pytest.mark.skipif(
    "CI" not in os.environ and (CHROMIUM is None or None in NEEDED.values()),
    reason="needs a Chromium (apt install chromium), playwright and gradio (make setup EXTRAS='dev try')",
)
HOSTILE = """"x ``` <img src='http://192.0.2.1/x.png'> &amp;\""""
GRAPH = f"(muốn :agent (cậu_bé #1) :polarity - :theme ({HOSTILE} :agent #1))"
"""An answer in the form `ptr`."""


@contextmanager
def opened(url: str) -> Iterator[Any]:
    """The page in a headless browser, which may reach nothing but this machine, and tries nothing else."""
    from playwright.sync_api import sync_playwright

    elsewhere: list[str] = []

    def look(request: Any) -> None:
        if not request.url.startswith((url, "data:", "blob:")):
            elsewhere.append(request.url)

    with sync_playwright() as playwright:
        # Its own sandbox cannot be had by root, nor in most containers.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, chromium_sandbox=False)
        page = browser.new_page(viewport={"width": 1100, "height": 900})
        page.set_default_timeout(60_000)
        page.on("request", look)
        page.goto(url)
        yield page
        browser.close()
    assert elsewhere == []


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Killed, if a test fails before it has ended it."""
    with process:
        try:
            yield process
        finally:
            process.kill()


@pipeline
@browser_test
def test_a_photograph_in_a_browser_comes_back_with_its_boxes(workspace: Path, tmp_path: Path) -> None:
    """The command itself, as make calls it; a Ctrl-C leaves nothing of what was uploaded."""
    record = read_split(Path("data/prepared/nutrition-tables"), "val")[0]
    (tmp_path / "photograph.jpg").write_bytes(record.image)
    (tmp_path / "bomb.png").write_bytes(bomb())
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(scratch),
        "PYTHONUNBUFFERED": "1",
        "BROWSER": "true",
    }
    with ended(
        subprocess.Popen(
            [sys.executable, "-m", "tools.try_it", DETECTION],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    ) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "http://" in line)
        listening = [each.laddr.ip for each in psutil.Process(process.pid).net_connections() if each.status == "LISTEN"]
        assert listening == ["127.0.0.1"]
        url = line.split("(")[0].split()[-1]
        with opened(url) as page:
            assert page.request.get(f"{url}gradio_api/file={Path.cwd()}/params.yaml").status == 403
            assert page.request.get(url, headers={"Host": "elsewhere.example"}).status == 400
            page.set_input_files("input[type=file]", tmp_path / "photograph.jpg")
            for index, run in enumerate(("base-vlm", DETECTION)):
                row = pq.read_table(f"data/runs/{run}/predictions.parquet").to_pylist()[0]
                answered = page.get_by_label("Answer, word for word").nth(index)
                page.wait_for_function("box => box.value", arg=answered.element_handle())
                assert answered.input_value() == row["text"]
                source = page.locator("img").nth(index).get_attribute("src")
                drawn = Image.open(io.BytesIO(page.request.get(source).body()))
                boxes = [(tuple(box), label or "?") for box, label in zip(row["boxes"], row["labels"], strict=True)]
                assert drawn.tobytes() == draw_boxes(record, boxes, PREDICTION_COLOUR).tobytes()
            page.get_by_label("Clear").click()
            page.set_input_files("input[type=file]", tmp_path / "bomb.png")
            refused = page.get_by_label("Cannot be asked")
            refused.wait_for()
            assert "3600000000 pixels" in refused.input_value()
            assert page.get_by_label("Answer, word for word").first.input_value() == ""
        assert list(scratch.iterdir())
        process.send_signal(signal.SIGINT)
        rest = process.communicate()[0]
    assert (process.returncode, "Traceback" in rest) == (0, False), rest
    assert list(scratch.iterdir()) == []


@contextmanager
def served(title: str, form: Form, models: list[LoadedModel]) -> Iterator[Any]:
    """The page in a browser, served by this process."""
    from tools.try_it.page import make_page, serve

    blocks = make_page(title, form, models)
    try:
        with opened(serve(blocks, None)) as page:
            yield page
    finally:
        blocks.close()


@pipeline
@browser_test
def test_a_sentence_in_a_browser_comes_back_as_a_drawn_graph(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of(AMR)
    models = command.load_models(subject, with_base=False)
    monkeypatch.setattr("tools.try_it.page.answer", lambda model, question: GRAPH)
    with served("amr", command.form_of(subject), models) as page:
        page.get_by_label("A sentence").fill("Cậu bé không muốn mua .")
        page.get_by_role("button", name="Ask").click()
        page.locator("svg .nodeLabel").first.wait_for()
        assert sorted(page.locator("svg .nodeLabel").all_inner_texts()) == sorted(["muốn", "cậu_bé", "-", HOSTILE])
        roles = [":agent", ":agent", ":polarity", ":theme"]
        assert sorted(page.locator("svg .edgeLabel p").all_inner_texts()) == roles
        page.get_by_label("A sentence").fill("")
        page.get_by_role("button", name="Ask").click()
        refused = page.get_by_label("Cannot be asked")
        refused.wait_for()
        assert refused.input_value() == "write a sentence first"


@pipeline
@browser_test
def test_a_talk_in_a_browser_goes_on_from_the_models_own_answers(workspace: Path) -> None:
    (model,) = command.load_models(subject_of(AMR), with_base=False)
    messages, answers = [said("system", "Short.")], []
    with served("chat", chat.Form(subject_of(AMR)), [model]) as page:
        page.get_by_label("A system prompt").fill("Short.")
        for turn, text in enumerate(("Xin chào", HOSTILE)):
            messages.append(said("user", text))
            answers.append(answer(model, Conversation(sample_id="", messages=messages)))
            messages.append(said("assistant", answers[-1]))
            page.get_by_label("A message").fill(text)
            page.get_by_role("button", name="Ask").click()
            page.get_by_test_id("bot").nth(turn).wait_for()
        assert page.get_by_test_id("bot").all_text_contents() == answers
        assert page.get_by_test_id("user").all_text_contents() == ["Xin chào", HOSTILE]

"""A page to try a run: answers as the stages give them, refusals, and a real browser."""

import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from PIL import Image

from stages.core.errors import UserError
from stages.core.params import load_params
from stages.data.conversation import message
from stages.evaluation.generate import Completion
from stages.tasks.amr.samples.graphs import read_graph
from stages.tasks.detection.samples import read_split
from stages.tasks.detection.scoring.drawing import PREDICTION_COLOUR, draw_boxes
from stages.tasks.moe.samples import Record, conversation
from tests import ROOT
from tests.data.images import bomb
from tests.stage_runs import done, made_up_memory, small_params, write_params
from tests.tasks.moe.made_up import fact, meeting
from tools.try_run import __main__ as command
from tools.try_run.forms import FORMS, Form, MoeForm, escaped, following, mermaid

pipeline = pytest.mark.pipeline
DETECTION, AMR = "r1-llm-only", "amr-ptr"
SENTENCES = ("Tôi đọc sách .", "Mẹ thấy  nhà .", "Ai đó ?")


@pytest.fixture(scope="module")
def page() -> Any:
    """Imported here, as it takes seconds, and every process that collects tests imports this file."""
    return pytest.importorskip("tools.try_run.page", reason="needs gradio (make setup EXTRAS='dev try')")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both were trained for two steps; detection was evaluated, its base too, and AMR made predictions."""
    workspace = tmp_path_factory.mktemp("workspace")
    (workspace / "data").mkdir()
    (workspace / "data/unknown.txt").write_text("".join(f"{sentence}\n" for sentence in SENTENCES))
    raw = small_params()
    raw["profiles"]["tiny"]["evaluation"]["max_new_tokens"] = 48
    for name in (DETECTION, AMR):
        raw["recipes"][name].update(max_steps=2, validation=None, quantization="none")
    raw["predictions"] = {"unknown": {"task": "amr", "recipe": AMR, "inputs": "data/unknown.txt"}}
    with pytest.MonkeyPatch.context() as patch, made_up_memory():
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


def form_of(name: str) -> Form:
    params = load_params()
    return FORMS[params.subject(name).task](params, name)


@pytest.fixture
def workspace(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which tests do not change."""
    monkeypatch.chdir(finished)
    return finished


@pipeline
def test_a_photograph_is_completed_as_by_evaluate(page: Any, workspace: Path, tmp_path: Path) -> None:
    form, models = form_of(DETECTION), command.load_models(load_params(), DETECTION, alone=False)
    assert [model.name.split()[0] for model in models] == ["bases/vlm", DETECTION]
    boxes = 0
    for index, record in enumerate(read_split(Path("data/prepared/nutrition-tables"), "val")[:3]):
        path = tmp_path / f"{index}.jpg"
        path.write_bytes(record.image)
        question = form.question(str(path))
        for model, name in zip(models, ("base-vlm", DETECTION), strict=True):
            row = pq.read_table(f"data/runs/{name}/predictions.parquet").to_pylist()[index]
            text = page.complete(model, question)
            assert text == row["text"]
            image, markdown = form.shown(question, text, model.generator)
            assert image is not None
            assert (f"of {record.width} x {record.height} pixels" in markdown) == bool(row["boxes"])
            boxes += len(row["boxes"])
    assert boxes, "the models named no box, so there was nothing to compare"


@pipeline
def test_a_sentence_is_completed_as_by_predict(page: Any, workspace: Path) -> None:
    form, (model,) = form_of(AMR), command.load_models(load_params(), AMR, alone=True)
    predicted = Path("data/predictions/unknown.txt").read_text(encoding="utf-8").split("\n\n")
    for sentence, block in zip(SENTENCES, predicted, strict=True):
        question = form.question(f" {sentence}\n")
        header, graph = block.strip().split("\n", 1)
        assert header == f"#::snt {sentence}"
        assert f"\n{graph}\n" in form.shown(question, page.complete(model, question), model.generator)[1]
    with pytest.raises(UserError, match=r"too long: .* tokens"):
        page.complete(model, form.question("Tôi đọc sách . " * 20_000))


@pytest.mark.parametrize("record", [fact(1), meeting(1)])
def test_a_question_is_asked_as_by_evaluate(record: Record) -> None:
    asked = MoeForm(load_params(ROOT / "params.yaml"), "moe-finetune").question(record.question, record.context or "")
    assert asked.messages == conversation(record, answered=False).messages


@pipeline
@pytest.mark.parametrize(
    ("name", "given", "problem"),
    [
        (DETECTION, bomb(), "pixels"),
        (DETECTION, b"\xff\xd8\xff\xe0 no more of it", "unreadable image"),
        (AMR, " \n", "write a sentence"),
        (AMR, "Tôi đọc .\nMẹ thấy .", "one sentence"),
        (AMR, "Tôi <|im_end|> đọc .", "chat markup"),
    ],
)
def test_unusable_input_is_refused(
    workspace: Path, tmp_path: Path, name: str, given: bytes | str, problem: str
) -> None:
    value = given
    if isinstance(value, bytes):
        (tmp_path / "photograph.jpg").write_bytes(value)
        value = str(tmp_path / "photograph.jpg")
    with pytest.raises(UserError, match=problem):
        form_of(name).question(value)


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
def test_a_run_that_cannot_be_tried_is_refused_at_once(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert "make setup EXTRAS=try" in CliRunner().invoke(command.main, [DETECTION]).output


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser_test = pytest.mark.skipif(
    "CI" not in os.environ and (CHROMIUM is None or find_spec("playwright") is None),
    reason="needs a Chromium (apt install chromium) and playwright",
)
HOSTILE = """"x ``` <img src='http://192.0.2.1/x.png'> &amp;\""""


@contextmanager
def opened(url: str) -> Iterator[Any]:
    """The page in a headless browser; every request has to go to this machine."""
    from playwright.sync_api import sync_playwright

    elsewhere: list[str] = []

    def check(request: Any) -> None:
        if not request.url.startswith((url, "data:", "blob:")):
            elsewhere.append(request.url)

    with sync_playwright() as playwright:
        # Its own sandbox works neither for root nor in most containers.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, chromium_sandbox=False)
        tab = browser.new_page(viewport={"width": 1100, "height": 900})
        tab.set_default_timeout(300_000)
        tab.on("request", check)
        tab.goto(url)
        yield tab
        browser.close()
    assert elsewhere == []


@contextmanager
def served(page: Any, form: Any, models: list[Any]) -> Iterator[Any]:
    blocks = page.make_page("page", form, models)
    try:
        with opened(page.serve(blocks, None)) as tab:
            yield tab
    finally:
        blocks.close()


@pipeline
@browser_test
def test_a_photograph_in_a_browser_gets_its_boxes(page: Any, workspace: Path, tmp_path: Path) -> None:
    """The command itself, as make calls it; Ctrl-C leaves nothing of the uploads."""
    record = read_split(Path("data/prepared/nutrition-tables"), "val")[0]
    (tmp_path / "photograph.jpg").write_bytes(record.image)
    (tmp_path / "bomb.png").write_bytes(bomb())
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(scratch), "BROWSER": "true"}
    words = [sys.executable, "-u", "-m", "tools.try_run", DETECTION]
    options: dict[str, Any] = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(words, **options) as process:
        try:
            assert process.stdout is not None
            url = next(line for line in process.stdout if "http://" in line).split("(")[0].split()[-1]
            connections = psutil.Process(process.pid).net_connections()
            assert [each.laddr.ip for each in connections if each.status == "LISTEN"] == ["127.0.0.1"]
            with opened(url) as tab:
                assert tab.request.get(f"{url}gradio_api/file={Path.cwd()}/params.yaml").status == 403
                assert tab.request.get(url, headers={"Host": "elsewhere.example"}).status == 400
                tab.set_input_files("input[type=file]", tmp_path / "photograph.jpg")
                for index, name in enumerate(("base-vlm", DETECTION)):
                    row = pq.read_table(f"data/runs/{name}/predictions.parquet").to_pylist()[0]
                    completed = tab.get_by_label("Completion, word for word").nth(index)
                    tab.wait_for_function("box => box.value", arg=completed.element_handle())
                    assert completed.input_value() == row["text"]
                    source = tab.locator("img").nth(index).get_attribute("src")
                    drawn = Image.open(io.BytesIO(tab.request.get(source).body()))
                    boxes = [(tuple(box), label or "?") for box, label in zip(row["boxes"], row["labels"], strict=True)]
                    assert drawn.tobytes() == draw_boxes(record, boxes, PREDICTION_COLOUR).tobytes()
                tab.get_by_label("Clear").click()
                tab.set_input_files("input[type=file]", tmp_path / "bomb.png")
                problem = tab.get_by_label("Cannot be asked")
                problem.wait_for()
                assert "3600000000 pixels" in problem.input_value()
                assert tab.get_by_label("Completion, word for word").first.input_value() == ""
            assert list(scratch.iterdir())
            process.send_signal(signal.SIGUSR1)  # as each of ENDING
            rest = process.communicate()[0]
        finally:
            process.kill()
    assert (process.returncode, "Traceback" in rest) == (0, False), rest
    assert list(scratch.iterdir()) == []


@pipeline
@browser_test
def test_a_sentence_in_a_browser_gets_a_drawn_graph(
    page: Any, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = f"(muốn :agent (cậu_bé #1) :polarity - :theme ({HOSTILE} :agent #1))"
    monkeypatch.setattr(page, "complete", lambda model, question: Completion(graph))
    with served(page, form_of(AMR), command.load_models(load_params(), AMR, alone=True)) as tab:
        tab.get_by_label("A sentence").fill("Cậu bé không muốn mua .")
        tab.get_by_role("button", name="Ask").click()
        tab.locator("svg .nodeLabel").first.wait_for()
        assert sorted(tab.locator("svg .nodeLabel").all_inner_texts()) == sorted(["muốn", "cậu_bé", "-", HOSTILE])
        roles = [":agent", ":agent", ":polarity", ":theme"]
        assert sorted(tab.locator("svg .edgeLabel p").all_inner_texts()) == roles


def test_a_dialogue_is_shown_as_text_and_goes_on_from_it(page: Any) -> None:
    turns = [message("system", "Short."), message("user", HOSTILE), message("assistant", "<b>no</b>")]
    shown = page.dialogue_of(turns)
    assert "<" not in "".join(each["content"] for each in shown)
    given = [{"role": each["role"], "content": [{"type": "text", "text": each["content"]}]} for each in shown]
    asked = Form(load_params(ROOT / "params.yaml"), "chat-full").question("And?", "Short.")
    assert following(asked, page.turns_of(given)).messages == [*turns, message("user", "And?")]


@pytest.mark.parametrize(
    ("form", "given"), [(Form, ["Why?", "", None, None]), (MoeForm, ["Why?", ""])], ids=["dialogue", "text"]
)
def test_a_completion_that_was_cut_is_marked(
    page: Any, monkeypatch: pytest.MonkeyPatch, form: type[Form], given: list[Any]
) -> None:
    settings = SimpleNamespace(settings=SimpleNamespace(max_new_tokens=48))
    models = [page.LoadedModel(name=name, generator=settings, context_length=64) for name in ("base", "trained")]
    whole, cut = Completion("Because."), Completion("Because of the")
    cut.is_cut = True
    monkeypatch.setattr(page, "complete", lambda model, question: cut if model is models[1] else whole)
    params = load_params(ROOT / "params.yaml")
    (ask,) = (each.fn for each in page.make_page("page", form(params, "chat-full"), models).fns.values())
    assert ask(*given)[-2:] == ["", "Cut at max_new_tokens, 48."]
    refused = ask("", *given[1:])
    assert "first" in refused[0].value
    assert refused[-2:] == ["", ""]
    assert len(refused) == len(ask(*given))

"""Publishing a run: what is written of it, and what is refused. tests/publishing/ checks the folder."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from click.testing import CliRunner
from huggingface_hub import ModelCard
from PIL import Image
from rich.console import Console

from stages.compare import compare_task
from stages.core.errors import UserError
from stages.core.params import load_params
from stages.data.conversation import Conversation
from stages.models.folders import read_config
from stages.models.prompts import load_processor, rendered, with_options
from stages.publish import gather, main, publish_run
from stages.publishing.model_card import write_card
from stages.publishing.signing import SIGNATURE_FILE
from stages.tasks.detection.report import REPORT
from tests import ROOT
from tests.damage import flip
from tests.made_up_publication import RUN, made_up_workspace
from tests.made_up_runs import made_up_ious, names_of
from tests.tiny_families import template_of

OUT = Path("data/published") / RUN
WEIGHTS = Path("data/runs") / RUN / "merged/model.safetensors"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up_workspace(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def workspace(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "workspace"
    shutil.copytree(finished, folder)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    return folder


def publish() -> Path:
    publish_run(load_params(), RUN, OUT)
    return OUT


def test_the_cards_table_and_figures_are_the_reports(workspace: Path) -> None:
    card = (publish() / "README.md").read_text()
    compare_task(load_params(), "detection", data_dir=Path("data"), console=Console(quiet=True))
    report = Path("data/report/detection/comparison.md").read_text().partition("\n## ")[0]
    assert "base is not on the hub: `adapter_config.json`" in card
    lines = [line for line in report.splitlines() if line.startswith("|") or RUN in line]
    assert len(lines) > 4
    assert [line for line in lines if line not in card] == []
    others = [name for name in names_of("detection") if not (Path("data/report/detection/runs") / name).exists()]
    assert others
    assert [name for name in others if f"| {name} |" not in card] == [], "recipes that were not run"
    metrics = json.loads((Path("data/runs") / RUN / "metrics.json").read_text())
    results = ModelCard.load(OUT / "README.md").data.eval_results
    assert {result.metric_type: result.metric_value for result in results} == {
        metric.key: metrics[metric.key] for metric in REPORT.metrics
    }


def code_of_card(question: Conversation, model_dir: Path) -> str:
    """The code of the card of the model in a folder, for this prompt."""
    found = gather(load_params(), RUN)
    write_card(replace(found, question=question, config=read_config(model_dir), trained_dir=None), model_dir)
    return (model_dir / "README.md").read_text().partition("```python\n")[2].partition("```")[0]


def test_the_card_shows_the_images_of_its_examples_and_of_a_text_task_the_texts(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = (publish() / "README.md").read_text()
    images = re.findall(r"^!\[(\S+)\]\(examples/\1\) !\[\S+\]\(\S+\)", card, re.MULTILINE)
    assert images == ["best-1.png", "worst-1.png", "random-1.png"]
    assert "Question:" not in card
    text_report = replace(REPORT, shown=("text",), identity=("image_id",) * 3)
    monkeypatch.setattr("stages.tasks.detection.report.REPORT", text_report)
    for path in Path("data").rglob("examples/*.png"):
        path.unlink()
    lines = (publish() / "README.md").read_text().split("Best:")[1].splitlines()
    found = [line for line in lines[: lines.index("## Use")] if line]
    first, second = (f"    completion {each}" for each in made_up_ious(0.6, 40, seed=1)[:2])
    one = ["Question:", "    image-000", "Reference answer:", "    image-000", "Completion:", first]
    other = ["Question:", "    image-001", "Reference answer:", "    image-001", "Completion:", second]
    assert found == [*one, *other, "Worst:", *one, *other, "Random:", *one, *other]


def test_the_code_of_a_text_models_card_gives_the_prompt_that_was_scored(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(ROOT / "data/tiny/qwen2", workspace / "text"))
    (folder / "chat_template.jinja").write_text(with_options(template_of("qwen3")))
    parts = [{"type": "text", "text": "tôi đi", "shortenable": True}, {"type": "text", "text": " đâu ?"}]
    question = Conversation(sample_id="a", messages=[{"role": "user", "content": parts}])
    code = code_of_card(question, folder)
    assert '"content": "tôi đi đâu ?"' in code
    assert "max_new_tokens=16)" in code
    monkeypatch.chdir(folder)
    ran: dict[str, Any] = {}
    exec(code, ran)  # noqa: S102 - our own
    assert capsys.readouterr().out.strip()
    assert ran["processor"].decode(ran["inputs"]["input_ids"][0]) == rendered(load_processor(folder, None), question)


def test_the_code_of_a_vision_models_card_turns_each_image_upright(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(ROOT / "data/tiny/qwen2-vl", workspace / "vision"))
    parts = [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]
    question = Conversation(
        sample_id="a", messages=[{"role": "user", "content": parts}], images=[Image.new("RGB", (28, 28))] * 2
    )
    code = code_of_card(question, folder)
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn
    for number in (1, 2):
        Image.new("RGB", (120, 80), "red").save(folder / f"image-{number}.jpg", exif=turned)
    sizes: list[tuple[int, int]] = []

    class Recording:
        """Our processor: transformers' own needs torchvision."""

        def __init__(self, folder: str) -> None:
            self.processor: Any = load_processor(Path(folder), None)

        def __call__(self, *, images: list[Image.Image], **options: Any) -> Any:
            sizes.extend(image.size for image in images)
            return self.processor(images=images, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.processor, name)

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", Recording)
    monkeypatch.chdir(folder)
    exec(code, {})  # noqa: S102 - our own
    assert sizes == [(80, 120)] * 2
    assert capsys.readouterr().out.strip()


def test_publishing_again_gives_the_same_bytes_apart_from_the_signature(workspace: Path) -> None:
    def files() -> dict[str, bytes]:
        return {path.relative_to(OUT).as_posix(): path.read_bytes() for path in publish().rglob("*") if path.is_file()}

    first, second = files(), files()
    assert {name for name in first if first[name] != second.get(name)} <= {SIGNATURE_FILE}
    assert first.keys() == second.keys()
    key = workspace / ".bakeoff/signing/key.pem"
    assert key.stat().st_mode & 0o077 == 0, "readable by its owner alone"


def test_base_and_data_of_the_hub_have_their_names_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = {"hub": "Qwen/Qwen2-VL-2B-Instruct", "revision": "a" * 40}
    monkeypatch.chdir(made_up_workspace(tmp_path, base_source=base))
    stats = Path("data/prepared/nutrition-tables/stats.json")
    found = json.loads(stats.read_text())
    dataset = "openfoodfacts/nutrition-table-detection"
    stats.write_text(json.dumps({**found, "source": f"hub:{dataset}@{'b' * 40}"}))
    card = ModelCard.load(publish() / "README.md").data
    assert (card.base_model, card.datasets, card.license) == ([base["hub"]], [dataset], "apache-2.0")
    assert "is not on the hub" not in (OUT / "README.md").read_text()
    assert {(each.dataset_type, each.dataset_revision) for each in card.eval_results} == {(dataset, "b" * 40)}


def test_a_base_of_unknown_licence_is_named_before_anybody_sends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(made_up_workspace(tmp_path, base_source={"hub": "somebody/base", "revision": "a" * 40}))
    assert ModelCard.load(publish() / "README.md").data.license is None
    assert "write it into `licenses` of params.yaml" in caplog.text


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (f"data/report/detection/runs/{RUN}/metrics.json", f"has not been evaluated; run: dvc repro evaluate@{RUN}"),
        (f"data/provenance/detection/train@{RUN}.json", f"dvc checkout data/provenance/detection/train@{RUN}.json"),
        (f"data/runs/{RUN}/merge.json", f"dvc repro -f -s merge@{RUN}"),
    ],
)
def test_a_run_that_is_not_complete_is_not_published(workspace: Path, missing: str, said: str) -> None:
    Path(missing).unlink()
    ended = CliRunner().invoke(main, [RUN])
    assert ended.exit_code == 1
    assert said in ended.output
    assert not Path("data/published").exists() or not list(Path("data/published").iterdir())


def test_a_run_that_is_not_what_was_evaluated_is_not_published(workspace: Path) -> None:
    publish()
    before = (OUT / SIGNATURE_FILE).read_bytes()
    lineage = Path("data/report/detection/runs") / RUN / "model_lineage.json"
    content = json.loads(lineage.read_text())
    lineage.write_text(json.dumps(content | {"digest": "0" * 64}))
    with pytest.raises(UserError, match=f"was evaluated with content 000000000000, .*dvc repro evaluate@{RUN}"):
        publish()
    assert (OUT / SIGNATURE_FILE).read_bytes() == before, "the earlier publication stays"
    lineage.write_text(json.dumps(content))
    flip(WEIGHTS)
    with pytest.raises(UserError, match=f"rebuild it with: dvc repro -f -s merge@{RUN}"):
        publish()

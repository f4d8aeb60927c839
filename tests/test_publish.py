"""Publishing a run: the files of the folder, and that any change in it is found and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
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
from stages.core.lineage import file_digest
from stages.core.params import load_params
from stages.kit.data.conversation import Conversation
from stages.kit.models.folders import read_config
from stages.kit.models.prompts import load_processor, rendered
from stages.kit.publishing.card import write_card
from stages.kit.publishing.folder import check_published
from stages.kit.publishing.signing import KEY_FILE, SIGNATURE_FILE, STATEMENT_FILE, read_statement, sign, signing_key
from stages.publish import gather, main, publish_run
from stages.tasks.detection.report import REPORT
from tests import ROOT
from tests.made_up_publication import RUN, made_up_workspace
from tests.tiny_families import template_of
from tools.verify.__main__ import main as verify

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


@pytest.fixture(scope="module")
def published(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published folder that was copied to another place, without its workspace."""
    workspace, copy = tmp_path_factory.mktemp("other") / "workspace", tmp_path_factory.mktemp("copy") / "model"
    shutil.copytree(finished, workspace)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        shutil.copytree(publish(), copy)
    return copy


@pytest.fixture
def copy(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "copy"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def sign_again(folder: Path) -> None:
    """Sign with the key of somebody else."""
    sign(folder, signing_key(folder.parent / "their-key"))


def test_a_copied_folder_is_verified_with_its_stages_and_lineage(copy: Path) -> None:
    result = CliRunner().invoke(verify, ["--published", str(copy)])
    assert result.exit_code == 0, result.output
    for words in (
        "train@r4-joint, 2026-11-21T10:01:00",
        "commit c0ffee",
        "merged r4-joint",
        "folder data/tiny/qwen2-vl",
    ):
        assert words in result.output
    checked = check_published(copy)
    assert [record.stage for record in checked.records] == [
        f"{stage}@{RUN}" for stage in ("train", "merge", "evaluate")
    ]
    assert checked.key in result.output


def test_a_flipped_byte_in_any_file_is_found_and_the_file_named(published: Path, tmp_path: Path) -> None:
    names = [path.relative_to(published).as_posix() for path in published.rglob("*") if path.is_file()]
    assert {"README.md", "model.safetensors", STATEMENT_FILE, SIGNATURE_FILE} <= set(names)
    copy = Path(shutil.copytree(published, tmp_path / "copy"))
    for name in names:
        flip(copy / name)
        problems = check_published(copy).problems
        assert any(problem.startswith(f"{name}: ") for problem in problems), (name, problems)
        shutil.copy(published / name, copy / name)
    assert not check_published(copy).problems


def test_a_file_more_or_less_is_found(copy: Path) -> None:
    (copy / "modeling.py").write_text("import os")
    (copy / "config.json").unlink()
    (copy / ".gitattributes").write_text("*.safetensors filter=lfs")  # which the hub adds
    said = CliRunner().invoke(verify, ["--published", str(copy)])
    assert said.exit_code == 1
    assert [line.partition(":")[0] for line in said.output.splitlines()] == ["modeling.py", "config.json", "DAMAGED"]


def test_the_signature_of_somebody_else_is_not_the_publishers(copy: Path, tmp_path: Path) -> None:
    theirs = shutil.copy(copy / KEY_FILE, tmp_path / "publisher.pem")
    assert not check_published(copy, Path(theirs)).problems
    sign_again(copy)
    assert not check_published(copy).problems, "it is consistent"
    assert check_published(copy, Path(theirs)).problems[0].startswith(f"{SIGNATURE_FILE}: is not by the key")
    said = CliRunner().invoke(verify, ["--published", str(copy), "--key", str(tmp_path / "none.pem")])
    assert f"there is no public key {tmp_path / 'none.pem'}" in said.output
    assert "DAMAGED" not in said.output


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("model.safetensors", None, "has content "),
        ("README.md", ("type: mean_iou\n      value: 0.", "type: mean_iou\n      value: 1."), "says mean_iou 1."),
        ("evidence/merge.json", ('"processor_parity": true', '"processor_parity": false'), "does not certify"),
    ],
)
def test_a_change_that_somebody_else_signs_contradicts_the_rest(
    copy: Path, name: str, change: tuple[str, str] | None, problem: str
) -> None:
    path = copy / name
    if change is None:
        flip(path)
    else:
        assert change[0] in path.read_text()
        path.write_text(path.read_text().replace(*change))
    sign_again(copy)
    problems = check_published(copy).problems
    assert [each.partition(":")[0] for each in problems] == [name]
    assert problem in "".join(problems)


def test_a_file_whose_digest_in_the_statement_was_changed_too_is_not_what_its_stage_left(copy: Path) -> None:
    before = file_digest(copy / "model.safetensors")
    flip(copy / "model.safetensors")
    path = copy / STATEMENT_FILE
    path.write_text(path.read_text().replace(before, file_digest(copy / "model.safetensors")))
    sign_again(copy)
    (problem,) = check_published(copy).problems
    assert problem == f"{STATEMENT_FILE}: has files of data/runs/{RUN}/merged that are not those that merge@{RUN} left"


def edit_records(folder: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    path = folder / STATEMENT_FILE
    content = json.loads(path.read_text())
    change(content["predicate"]["buildDefinition"]["internalParameters"]["records"])
    path.write_text(json.dumps(content))
    sign_again(folder)


def test_records_of_another_base_or_without_a_stage_break_the_chain(copy: Path) -> None:
    base = read_statement(copy).records[0].inputs["data/bases/vlm"]
    edit_records(copy, lambda records: records[0]["inputs"].update({"data/bases/vlm": "0" * 64}))
    assert f"train@{RUN} read nothing with content {base[:12]}" in "".join(check_published(copy).problems)
    edit_records(copy, lambda records: records.__delitem__(slice(0, 3, 2)))
    problems = "".join(check_published(copy).problems)
    assert f"has no record of train@{RUN}" in problems
    assert f"has no record of evaluate@{RUN}" in problems


def test_the_cards_table_and_figures_are_the_reports(workspace: Path) -> None:
    card = (publish() / "README.md").read_text()
    compare_task(load_params(), "detection", data_dir=Path("data"), console=Console(quiet=True))
    report = Path("data/report/detection/comparison.md").read_text().partition("\n## ")[0]
    lines = [line for line in report.splitlines() if line.startswith("|") or RUN in line]
    assert len(lines) > 4
    assert [line for line in lines if line not in card] == []
    metrics = json.loads((Path("data/runs") / RUN / "metrics.json").read_text())
    results = ModelCard.load(OUT / "README.md").data.eval_results
    assert {result.metric_type: result.metric_value for result in results} == {
        metric.key: metrics[metric.key] for metric in REPORT.metrics
    }


def code_of_card(question: Conversation, model_dir: Path) -> str:
    """The code of the card of the model in a folder, for this prompt."""
    found = gather(load_params(), RUN)
    write_card(replace(found, question=question, config=read_config(model_dir), adapter=None), model_dir)
    return (model_dir / "README.md").read_text().partition("```python\n")[2].partition("```")[0]


def test_the_code_of_a_text_models_card_gives_the_prompt_that_was_scored(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(ROOT / "data/tiny/qwen2", workspace / "text"))
    (folder / "chat_template.jinja").write_text(template_of("qwen3"))
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
    assert {(each.dataset_type, each.dataset_revision) for each in card.eval_results} == {(dataset, "b" * 40)}


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (f"data/report/detection/runs/{RUN}/metrics.json", f"has not been evaluated; run: dvc repro evaluate@{RUN}"),
        (f"data/provenance/detection/train@{RUN}.json", f"dvc checkout data/provenance/detection/train@{RUN}.json"),
        (f"data/runs/{RUN}/merge.json", f"dvc repro merge@{RUN}"),
    ],
)
def test_a_run_that_is_not_complete_is_not_published(workspace: Path, missing: str, said: str) -> None:
    Path(missing).unlink()
    ended = CliRunner().invoke(main, [RUN])
    assert ended.exit_code == 1
    assert said in ended.output
    assert not Path("data/published").exists() or not list(Path("data/published").iterdir())


@pytest.mark.parametrize(
    ("stage", "kind", "problem"),
    [
        ("merge", "outputs", f"merge@{RUN} made nothing with content"),
        ("evaluate", "inputs", f"evaluate@{RUN} read another model"),
    ],
)
def test_a_run_whose_files_are_not_those_of_its_records_is_not_published(
    workspace: Path, stage: str, kind: str, problem: str
) -> None:
    publish()
    before = (OUT / SIGNATURE_FILE).read_bytes()
    path = Path(f"data/provenance/detection/{stage}@{RUN}.json")
    record = json.loads(path.read_text())
    record[kind][f"data/runs/{RUN}/merged"] = "0" * 64
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=f"(?s){problem}.*run dvc repro evaluate@{RUN}.*make verify"):
        publish()
    assert (OUT / SIGNATURE_FILE).read_bytes() == before, "the earlier publication stays"
    flip(WEIGHTS)
    with pytest.raises(UserError, match=f"rebuild it with: dvc repro -f -s merge@{RUN}"):
        publish()

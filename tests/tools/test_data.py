import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from PIL import Image
from ruamel.yaml import YAML

from stages.core.params.schema import DataParams, DatasetParams, LimitParams, SplitParams
from stages.core.tasks import load_task
from stages.data.folder import Folder
from stages.data.prepared import prepare
from tests import ROOT
from tests.data.images import png
from tests.stage_runs import read_params, write_params, write_workspace
from tests.tasks import write_lines
from tests.tasks.detection.written import PHOTOS, WRITERS, Photo
from tools.data.__main__ import main
from tools.data.conversations import conversations


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_workspace(tmp_path, read_params(ROOT / "params.yaml"))
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_a_folder_is_shown_with_all_that_is_wrong_and_the_entry_that_asks_for_it(workspace: Path) -> None:
    WRITERS["yolo"](workspace / "photos", PHOTOS)
    (workspace / "photos/train/labels/a.txt").write_text("9 0.5 0.5 0.1 0.1\n")
    ended = run("photos")
    assert ended.exit_code == 0, ended.output
    lines = [" ".join(line.split()) for line in ended.output.splitlines()]
    for line in (
        "train: samples 2; 1 invalid one",
        "train: without a box 1 image",
        "train: boxes an image 0: 1, 3: 1",
        "train: cup 1 box in 1 image",
        "val: Nährwerte 1 box in 1 image",
        "train/labels/a.txt: line 1: no class has the number 9; there are 3",
    ):
        assert line in lines
    assert any(line.startswith("train: tokens ") and "r1-llm-only" in line for line in lines)
    (page,) = (workspace / ".bakeoff/data").iterdir()
    text = page.read_text()
    assert text.count('<img src="data:image/') == 3
    assert "no class has the number 9" in text

    entry = YAML(typ="safe").load(ended.stdout.split("params.yaml:")[1])["nutrition-tables"]
    assert entry["reader"]["category"] == ["Nährwerte", "cup", "red lid"]
    assert f"<|vision_end|>{entry['reader']['prompt']}<|im_end|>" in ended.stdout, "the sample is of what is proposed"
    (workspace / "photos/train/labels/a.txt").write_text("0 0.5 0.5 0.1 0.1\n")
    sources = load_task("detection", "sources")
    stats = prepare(sources, DatasetParams(**entry), DataParams(), workspace / "prepared", path="datasets.photos")
    assert stats["splits"]["train"]["records"] == 3


def test_a_dataset_is_shown_as_params_have_it(workspace: Path) -> None:
    WRITERS["voc"](workspace / "photos", PHOTOS)
    params = read_params()
    params["profiles"]["tiny"]["datasets"]["nutrition-tables"] = {
        "task": "detection", "source": "folder:photos",
        "reader": {"category": ["cup", "Nährwerte"], "label": {"cup": "<b>mug</b>"}},
    }  # fmt: skip
    write_params(params)
    ended = run("--dataset", "nutrition-tables")
    assert ended.exit_code == 0, ended.output
    assert "Annotations/empty.xml: no boxes" in ended.output
    assert "<b>mug</b>" in ended.output
    page = (workspace / ".bakeoff/data/nutrition-tables.html").read_text()
    assert "<b>mug</b>" not in page
    assert "&lt;b&gt;mug" in page


@pytest.mark.parametrize(
    ("dataset", "recipe", "answer_format"),
    [
        ("nutrition-tables", "r1-llm-only", None),
        ("visempar", "amr-mtup", "mtup"),
        ("truthfulqa", None, None),
        ("conversations", None, None),
    ],
)
def test_a_sample_is_shown_with_what_counts_in_the_loss(
    workspace: Path, dataset: str, recipe: str | None, answer_format: str | None
) -> None:
    params = read_params()
    params["profiles"]["tiny"]["datasets"][dataset]["limit"] = {"train": 3, "val": 2}
    write_params(params)
    ended = run("--dataset", dataset, *(["--recipe", recipe] if recipe else []))
    assert ended.exit_code == 0, ended.output
    task = params["profiles"]["tiny"]["datasets"][dataset]["task"]
    chosen = DatasetParams(task=task, source=f"folder:data/tiny/{dataset}", limit=LimitParams(train=3, val=2))
    sources, samples = load_task(task, "sources"), load_task(task, "samples")
    prepare(sources, chosen, DataParams(), workspace / "out", path="datasets.chosen")
    record = samples.read_split(workspace / "out", "train")[0]
    asked = samples.ForModel("qwen2_vl", lambda *size: size) if task == "detection" else samples
    messages = asked.conversation(record, answered=True, answer_format=answer_format).messages
    shown = ended.stdout.partition("\u27e6 \u27e7:")[2]
    counted = re.findall("\u27e6(.*?)\u27e7", shown, re.DOTALL)
    assert [text.removesuffix("<|im_end|>") for text in counted] == [messages[-1]["content"][0]["text"]]
    assert messages[0]["content"][-1]["text"] in shown
    (share,) = re.findall(r"train: in the loss +(\d+)% of the tokens of 3 samples", ended.stdout)
    assert 0 < int(share) < 100
    assert ("<|image_pad|> x " in shown) == (task == "detection")


@pytest.mark.parametrize(
    ("recipe", "share", "answer"),
    [("moe-expert-qmsum", "10%", "The hat is made of coal."), ("moe-gate-labels", "100%", None)],
)
def test_a_recipe_alone_shows_its_own_dataset_mixes_included(
    workspace: Path, recipe: str, share: str, answer: str | None
) -> None:
    ended = run("--recipe", recipe)
    assert ended.exit_code == 0, ended.output
    assert f"{share} of the tokens of 64 samples count in the loss of {recipe}" in ended.stdout
    (counted,) = re.findall("\u27e6([^ ].*?)\u27e7", ended.stdout.partition("\u27e6 \u27e7:")[2], re.DOTALL)
    assert counted == f"{answer}<|im_end|>" if answer else counted.startswith("<|im_start|>system")


def test_a_dataset_is_shown_in_the_form_of_a_recipe_that_trains_on_it(workspace: Path) -> None:
    assert "count in the loss of moe-expert-qmsum" in run("--dataset", "qmsum").output


def test_a_copy_in_another_size_in_another_split_is_shown(workspace: Path) -> None:
    rows = pq.read_table(ROOT / "data/tiny/nutrition-tables/data/val-00000-of-00001.parquet").to_pylist()
    photos = [Image.open(io.BytesIO(row["image"]["bytes"])) for row in rows[:4]]

    def photo(number: int, image: Image.Image) -> Photo:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=70)
        return Photo(name=f"{number}.jpg", encoded=buffer.getvalue(), boxes=[((0.25, 0.1, 0.5, 0.9), "cup")])

    train = [photo(number, image) for number, image in enumerate(photos[:3])]
    val = [photo(8, photos[1].reduce(2)), photo(9, photos[3])]
    WRITERS["yolo"](workspace / "photos", {"train": train, "val": val})
    output = " ".join(run("photos").output.split())
    assert "near-duplicates 1 sample: train train/labels/1.txt resembles val val/labels/8.txt" in output


def test_an_unknown_recipe_or_no_data_is_refused(workspace: Path) -> None:
    unknown = run("--dataset", "visempar", "--recipe", "amr-mtp").output
    assert "is called 'amr-mtp' (did you mean 'amr-mtup'?); there are: amr-baseline, " in unknown
    assert "DATASET=" in run().output
    assert run("nowhere").output.endswith("Error: there is no folder nowhere\n")


TALKS = [{"conversations": [{"from": "human", "value": f"{n}?"}, {"from": "gpt", "value": f"{n}."}]} for n in range(20)]
ALPACA = [{"instruction": f"{n}?", "input": "", "output": f"{n}.", "category": "a"} for n in range(20)]


@pytest.mark.parametrize(
    ("files", "form", "splits"),
    [
        ({"sharegpt.json": TALKS}, "conversations, as in conversations (ShareGPT", {"train": ["sharegpt.json"]}),
        ({"train.jsonl": ALPACA[:9], "val.jsonl": ALPACA[9:]}, "instruction and output, as in", None),
        (
            {"de/a.json": TALKS[:9], "de/b.json": ALPACA[9:15], "de/val.json": ALPACA[15:]},
            "conversations, as in",
            {"train": ["de/a.json", "de/b.json"], "val": ["de/val.json"]},
        ),
        (
            {"train/a.jsonl": ALPACA[:9], "valid/a.jsonl": ALPACA[9:]},
            "instruction and output",
            {"train": ["train/a.jsonl"], "val": ["valid/a.jsonl"]},
        ),
        (
            {"my_test.jsonl": ALPACA[:4], "my_train.jsonl": ALPACA[4:9], "my_valid.jsonl": ALPACA[9:]},
            "instruction and output",
            {"train": ["my_train.jsonl"], "val": ["my_valid.jsonl"], "test": ["my_test.jsonl"]},
        ),
        (
            {"data/train-0.jsonl": ALPACA[:9], "data/test-0.jsonl": ALPACA[9:]},
            "instruction and output",
            {"train": ["data/train-0.jsonl"], "val": ["data/test-0.jsonl"]},
        ),
        (
            {"train.jsonl": ALPACA[:9], "val/a.jsonl": ALPACA[9:]},
            "instruction and output",
            {"train": ["train.jsonl"], "val": ["val/a.jsonl"]},
        ),
        ({"talks [1].json": TALKS}, "conversations", {"train": ["talks [[]1].json"]}),
        *(
            ({train: ALPACA[:9], val: ALPACA[9:]}, "instruction and output", {"train": [train], "val": [val]})
            for train, val in (
                ("alpaca_train_10k.jsonl", "alpaca_test_1k.jsonl"),
                ("faq.train.final.jsonl", "faq.test.final.jsonl"),
                ("data.jsonl", "holdout.jsonl"),
                ("train.jsonl", "my_val.jsonl"),
            )
        ),
        ({"trainset.jsonl": ALPACA[:9], "evaluation.jsonl": ALPACA[9:]}, "instruction and output", None),
        (
            {"train.jsonl": ALPACA[:9], "test.jsonl": ALPACA[9:12], "faq_valset.jsonl": ALPACA[12:]},
            "instruction and output",
            {"train": ["train.jsonl"], "val": ["faq_valset.jsonl"], "test": ["test.jsonl"]},
        ),
        (
            {"a [1]/0.jsonl": ALPACA[:9], "a [1]/1.jsonl": ALPACA[9:15], "val/0.jsonl": ALPACA[15:]},
            "instruction and output",
            {"train": ["a [[]1]/*.jsonl"], "val": ["val/0.jsonl"]},
        ),
    ],
)
def test_a_folder_of_conversations_is_shown_with_the_entry_that_reads_it(
    workspace: Path, files: dict[str, Any], form: str, splits: dict[str, list[str]] | None
) -> None:
    for name, rows in files.items():
        (workspace / "talks" / name).parent.mkdir(parents=True, exist_ok=True)
        lines = name.endswith(".jsonl")
        text = "".join(f"{json.dumps(row)}\n" for row in rows) if lines else json.dumps(rows, indent=2)
        (workspace / "talks" / name).write_text(text)
    ended = run("talks")
    assert ended.exit_code == 0, ended.output
    assert f"form                      {form}" in ended.output
    assert ("fields not read           category (" in ended.output) == ("category" in json.dumps(files))
    entry = YAML(typ="safe").load(ended.stdout.split("params.yaml:")[1])["conversations"]
    assert entry.get("splits") == splits
    given = {**entry, "splits": SplitParams(**{name: tuple(some) for name, some in (splits or {}).items()})}
    stats = prepare(load_task("chat", "sources"), DatasetParams(**given), DataParams(), workspace / "out", path="x")
    assert sum(split["records"] for split in stats["splits"].values()) == 20


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train.jsonl", '{"question": "Who?", "answer": "You."}\n', "train.jsonl has question, answer in a row;"),
        ("train.jsonl", "Who?,You.\n" * 40, "line 1: not JSON"),
        ("chats.json", "", "chats.json: the file is empty"),
        ("chats.json", "[]\n", "has only 0 questions to train on"),
        ("chats.json", '[{"conversations": [{"from": "human", "val', "chats.json line 1: not JSON"),
        ("metadata.jsonl", '{"file_name": "a.png", "text": "Cup"}\n', "metadata.jsonl has file_name, text in a row;"),
        (
            "metadata.jsonl",
            '{"file_name": "a.png", "objects": {"bbox": []}}\n',
            "metadata.jsonl has an imagefolder's boxes: write them as COCO's JSON",
        ),
        ("a.json", '{"imagePath": "a.png", "shapes": [{"label": "cup"}]}', "1 .json file (a.json)"),
        ("boxes.csv", "image,xmin,ymin,xmax,ymax\na.png,1,2,3,4\n", "1 .csv file (boxes.csv)"),
    ],
)
def test_a_folder_in_no_known_form_says_what_is_expected(
    workspace: Path, file: str, content: str, message: str
) -> None:
    (workspace / "talks").mkdir()
    (workspace / "talks/a.png").write_bytes(png())
    (workspace / "talks" / file).write_text(content)
    ended = run("talks")
    assert ended.exit_code == 1
    assert message in ended.output
    expected = r"expected messages, or conversations|39 more of this kind|Expected: train\*|expected at least 2"
    expected += "|as COCO's JSON|Expected one of:\n.*COCO.*YOLO.*Pascal VOC"
    assert re.search(expected, ended.output, re.DOTALL)


@pytest.mark.parametrize("name", ["train.jsonl.gz", "train.csv", "train.xlsx", "train.txt"])
def test_a_folder_without_images_says_what_files_of_conversations_are(workspace: Path, name: str) -> None:
    (workspace / "talks").mkdir()
    (workspace / "talks" / name).write_text("x")
    output = run("talks").output
    assert f"talks has neither conversations nor images: it holds 1 .{name.rpartition('.')[2].lower()} file" in output
    assert "Expected .jsonl, .json or .parquet files, each object or row with messages, or conversations" in output


def test_a_folder_of_save_to_disk_says_how_it_is_read(workspace: Path) -> None:
    (workspace / "talks").mkdir()
    (workspace / "talks/data-00000-of-00001.arrow").write_text("x")
    (workspace / "talks/dataset_info.json").write_text('{"features": {"messages": {}}}')
    assert "talks is of save_to_disk: load_from_disk, and each split's to_parquet" in run("talks").output


def test_conversations_that_the_model_at_hand_does_not_take_are_proposed(workspace: Path) -> None:
    (workspace / "talks").mkdir()
    (workspace / "talks/a.png").write_bytes(png())
    rows = ({"prompt": f"Who is {name}?", "completion": "You.", "image": "a.png"} for name in "abcdefghijkl")
    write_lines(workspace / "talks/train.jsonl", *rows)
    proposed = run("talks")
    assert proposed.exit_code == 0, proposed.output
    assert re.search(r"tokens +not counted: sample train.jsonl:1 has images, and .* is a text model", proposed.output)
    assert "source: folder:talks\n" in proposed.output
    assert run("talks", "--recipe", "chat-lora").exit_code == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "Who?", "answer": "You.", "image": {"bytes": png()}}, "has question, answer, image in a row;"),
        ({"instruction": "Who?", "output": None}, "has instruction in a row; expected messages, or conversations"),
        ({"image": {"bytes": png()}, "objects": {"bbox": []}}, "lacks image_id, objects.category_name; it has image, "),
    ],
)
def test_a_table_of_another_form_says_what_is_expected(workspace: Path, row: dict[str, Any], message: str) -> None:
    (workspace / "talks").mkdir()
    pq.write_table(pa.Table.from_pylist([row]), workspace / "talks/train.parquet")
    assert message in run("talks").output


def test_a_first_line_of_another_form_is_one_problem(workspace: Path) -> None:
    (workspace / "talks").mkdir()
    lines = [{"version": 1}, *TALKS]
    (workspace / "talks/data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lines))
    output = run("talks").output
    assert "data.jsonl line 1: no conversation: found version, expected messages" in output
    assert YAML(typ="safe").load(output.split("params.yaml:")[1])["conversations"]["splits"] == {
        "train": ["data.jsonl"]
    }


def test_json_lines_beside_photographs_are_no_conversations(workspace: Path) -> None:
    WRITERS["coco"](workspace / "photos", PHOTOS)
    (workspace / "photos/results.jsonl").write_text('{"image_id": 1, "score": 0.5}\n')
    assert "task: detection" in run("photos").stdout


def test_photographs_alone_are_known_without_a_look_into_each_annotation(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WRITERS["voc"](workspace / "photos", PHOTOS)
    monkeypatch.setattr(Folder, "with_content", None)
    assert conversations("folder:photos") is None


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_category_that_is_not_trained_on_is_not_asked_for(workspace: Path, spoilt: bool) -> None:
    a, b, empty = PHOTOS["train"]
    WRITERS["yolo"](workspace / "photos", {"train": [a, empty], "val": [b]})
    if spoilt:
        (workspace / "photos/train/labels/empty.txt").write_text("1 0.5 0.5 0.1 2\n")
    reader = YAML(typ="safe").load(run("photos").stdout.split("params.yaml:")[1])["nutrition-tables"]["reader"]
    assert reader["category"] == (["Nährwerte", "cup", "red lid"] if spoilt else ["cup"])

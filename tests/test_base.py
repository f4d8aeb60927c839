"""The stage that copies a base model, and the folders that it refuses."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

import stages.base
from tests import ROOT
from tests.stage_runs import write_params
from tests.tiny_families import TEMPLATES_DIR


def base(name: str, source: Path | str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    monkeypatch.chdir(workspace)
    raw = YAML(typ="safe").load(ROOT / "params.yaml")
    raw["profiles"]["tiny"]["bases"][name] = f"folder:{source}"
    write_params(raw)
    result = CliRunner().invoke(stages.base.main, [name])
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result.exit_code, result.output


DISTILLED = (TEMPLATES_DIR / "deepseek_r1_distill.jinja").read_text()


@pytest.mark.parametrize(
    ("file", "content", "part"),
    [
        *(("config.json", config, "my model/config.json") for config in ("[" * 200_000, "\xff")),
        *(("config.json", config, "my model is no model that can be") for config in ("{}", '{"model_type": 5}')),
        ("tokenizer.json", "{}", "my model is no model that can be loaded"),
        *(
            ("chat_template.jinja", template, "the chat template of my model (chat_template.jinja")
            for template in ("{{ 1/0 }}", "{% if %}")
        ),
        ("chat_template.jinja", DISTILLED, "so the model never stops"),
    ],
)
def test_a_damaged_folder_is_refused_by_the_name_that_the_user_gave(
    file: str, content: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "data/tiny/qwen2", tmp_path / "my model")
    (tmp_path / "my model" / file).write_bytes(content.encode("utf-8" if file.startswith("chat") else "latin-1"))
    code, output = base("llm", "my model", tmp_path, monkeypatch)
    assert code == 1
    assert part in output
    assert ".partial" not in output
    assert not list((tmp_path / "data/bases").iterdir())

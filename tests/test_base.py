"""The stage that brings a base model, on folders that are none."""

import json
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


@pytest.mark.parametrize(("name", "folder"), [("vlm", "qwen2"), ("vlm", "qwen2-folklore"), ("llm", "qwen2-vl")])
def test_a_model_that_the_recipes_of_a_base_cannot_use_is_refused(
    name: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = base(name, ROOT / "data/tiny" / folder, tmp_path, monkeypatch)
    assert code == 1
    assert f"base {name} is of no use to the recipes" in said
    assert (
        f"the base is a {json.loads((ROOT / 'data/tiny' / folder / 'config.json').read_text())['model_type']}" in said
    )
    assert not list((tmp_path / "data/bases").iterdir())


@pytest.mark.parametrize("config", ["[1, 2]", "[" * 200_000, "{", "{}", '{"model_type": 5}', "\xff"])
def test_a_message_names_the_folder_that_the_user_named(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "data/tiny/qwen2", tmp_path / "my model")
    (tmp_path / "my model/config.json").write_bytes(config.encode("latin-1"))
    code, said = base("llm", "my model", tmp_path, monkeypatch)
    assert code == 1
    assert "my model/config.json" in said
    assert ".partial" not in said


@pytest.mark.parametrize(
    "template", ["{{ 1/0 }}", "{{ raise_exception('x') }}", "{% if %}", "{{ messages.nothing() }}"]
)
def test_a_chat_template_that_fails_is_refused(template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "data/tiny/qwen2", tmp_path / "my model")
    (tmp_path / "my model/chat_template.jinja").write_text(template)
    code, said = base("llm", "my model", tmp_path, monkeypatch)
    assert code == 1
    assert "the chat template of my model (chat_template.jinja" in said
    assert not list((tmp_path / "data/bases").iterdir())


def test_a_chat_template_that_trains_otherwise_than_it_asks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "data/tiny/qwen2", tmp_path / "my model")
    shutil.copy(TEMPLATES_DIR / "deepseek_r1_distill.jinja", tmp_path / "my model/chat_template.jinja")
    code, said = base("llm", "my model", tmp_path, monkeypatch)
    assert code == 1
    assert "by the chat template of my model, a model would be trained on" in said
    assert "<think>\\n', with which that does not begin; docs/extending.md#a-model-family" in said


def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "data/tiny/qwen2", tmp_path / "my model")
    (tmp_path / "my model/tokenizer.json").write_text("{}")
    code, said = base("llm", "my model", tmp_path, monkeypatch)
    assert code == 1
    assert "my model is no model that can be loaded" in said


def test_the_models_of_this_repository_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, folder in (("vlm", "qwen2-vl"), ("llm", "qwen2"), ("dense", "qwen2-folklore")):
        code, said = base(name, ROOT / "data/tiny" / folder, tmp_path, monkeypatch)
        assert code == 0, said

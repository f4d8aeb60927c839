"""The stage that copies a base model, and the folders that it refuses."""

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

import stages.base
from stages.data.conversation import Conversation, message
from stages.models.prompts import encode, load_processor
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


CONFIG = json.loads((ROOT / "data/tiny/qwen2/config.json").read_text())
DISTILLED = (TEMPLATES_DIR / "deepseek_r1_distill.jinja").read_text()


@pytest.mark.parametrize(
    ("file", "content", "part"),
    [
        *(("config.json", config, "my model/config.json") for config in ("[" * 200_000, "\xff")),
        *(("config.json", config, "my model is no model that can be") for config in ("{}", '{"model_type": 5}')),
        (
            "config.json",
            json.dumps(CONFIG | {"vocab_size": 1281, "pad_token_id": None}),
            "my model has 1,281 embeddings, none of '<|im_start|>', number 1,282 of its tokenizer",
        ),
        ("adapter_config.json", "{}", "my model holds an adapter"),
        ("tokenizer.json", "{}", "my model is no model that can be loaded"),
        *(
            ("chat_template.jinja", template, "the chat template of my model (chat_template.jinja")
            for template in ("{{ 1/0 }}", "{% if %}")
        ),
        ("chat_template.jinja", DISTILLED, "; the model never stops"),
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


def test_a_base_without_a_chat_template_takes_that_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "data/tiny/qwen2", tmp_path / "my model")
    (tmp_path / "my model/chat_template.jinja").unlink()
    _, output = base("llm", "my model", tmp_path, monkeypatch)
    assert "my model has no chat template; docs/extending.md#a-model-family has one" in output
    (written,) = re.findall(r"```jinja\n(.*?)\n```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)
    (tmp_path / "my model/chat_template.jinja").write_text(written)
    assert base("llm", "my model", tmp_path, monkeypatch)[0] == 0
    processor = load_processor(tmp_path / "data/bases/llm", None)
    talk = [message(role, text) for role, text in (("system", "Be brief."), ("user", "Who?"), ("assistant", "You."))]
    batch = encode(processor, [Conversation(sample_id="a", messages=talk)], padding_side="right", mark_answers=True)
    assert processor.decode(batch["input_ids"][0]) == "system: Be brief.\nuser: Who?\nassistant: You.<|im_end|>"
    assert processor.decode(batch["input_ids"][batch["answers"]]) == " You.<|im_end|>"


@pytest.mark.parametrize(
    ("model_type", "architecture", "known"),
    [
        ("qwen2", "Qwen2ForCausalLM", True),
        ("qwen2", "QWen2ForCausalLM", True),
        ("qwen2", "OwnForCausalLM", False),
        ("internlm2", "Qwen2ForCausalLM", False),
    ],
)
def test_code_of_a_model_that_transformers_has_is_left_out(
    model_type: str, architecture: str, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "data/tiny/qwen2", tmp_path / "my model")
    plain = CONFIG | {"model_type": model_type, "architectures": [architecture]}
    config = plain | {"auto_map": {"AutoConfig": "configuration_own.Config"}}
    (tmp_path / "my model/config.json").write_text(json.dumps(config))
    code, output = base("llm", "my model", tmp_path, monkeypatch)
    assert json.loads((tmp_path / "my model/config.json").read_text()) == config
    assert (code == 0) == known
    if known:
        assert "its own code (auto_map) is not used: transformers has a qwen2 itself" in output
        assert json.loads((tmp_path / "data/bases/llm/config.json").read_text()) == plain
    else:
        assert "wants to run code of its own (auto_map)" in output

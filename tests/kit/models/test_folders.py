import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from stages.core.errors import UserError
from stages.kit.models.folders import check_model_folder, copy_model_files


@pytest.mark.parametrize("link", [False, True])
def test_a_models_files_are_taken_and_nothing_else(
    link: bool, tiny_vlm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    for path in tiny_vlm.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    for stray in ("pytorch_model.bin", "modeling_own.py", "lineage.json", ".gitattributes", "README.md"):
        (source / stray).write_text("{}")
    for weights in ("adapter_model.safetensors", "extra.safetensors"):
        save_file({"a": np.zeros(1)}, source / weights)
    copy_model_files(source, target, link=link)
    assert {path.name for path in target.iterdir()} == {path.name for path in tiny_vlm.iterdir()}
    check_model_folder(target)
    assert "not copied, as the model does not use it: adapter_model.safetensors, extra.safetensors" in caplog.text


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere does not exist"):
        copy_model_files(tmp_path / "nowhere", tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "is no model folder"),
        (lambda folder: (folder / "config.json").write_text("{"), "is damaged"),
        (lambda folder: (folder / "model.safetensors").unlink(), "lacks model.safetensors; weights are read from"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x08"), "model.safetensors is damaged"),
        (
            lambda folder: (folder / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "own.Model"}})),
            "wants to run code of its own",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
            ),
            "lacks model-00001-of-00002.safetensors",
        ),
        (lambda folder: (folder / "config.json").write_text("[1, 2]"), "config.json is damaged: expected the settings"),
        (lambda folder: (folder / "config.json").write_text("[" * 200_000), "config.json is damaged: .* nested"),
        (lambda folder: (folder / "tokenizer.json").write_text("[" * 200_000), "tokenizer.json is damaged: .* nested"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": 5}'),
            "index.json is damaged: expected a weight_map",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": ["b"]}}'),
            "index.json is damaged: expected a weight_map",
        ),
        (
            lambda folder: (folder / "tokenizer_config.json").write_text(
                '{"auto_map": {"AutoTokenizer": ["own.T", 0]}}'
            ),
            "tokenizer_config.json wants to run code of its own",
        ),
        (
            lambda folder: (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}'),
            "holds an adapter beside the model",
        ),
        (
            lambda folder: (folder / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}'),
            "quantized already",
        ),
        (
            lambda folder: (folder / "config.json").write_text('{"text_config": {"quantization_config": {"bits": 4}}}'),
            "quantized already",
        ),
        (lambda folder: save_file({}, folder / "model.safetensors"), "model.safetensors holds no weights"),
        (
            lambda folder: (folder / "config.json").write_text('{"text_config": {"num_hidden_layers": 3000000}}'),
            "num_hidden_layers is 3000000, expected at most",
        ),
        (
            lambda folder: (folder / "config.json").write_text('{"attn_implementation": "somebody/kernel"}'),
            "wants to run code from the hub",
        ),
        (
            lambda folder: (folder / "config.json").write_text('{"_attn_implementation": {"": "somebody/kernel"}}'),
            "wants to run code from the hub",
        ),
    ],
)
def test_what_is_no_safe_model_is_refused(damage: object, message: str, tiny_vlm: Path, tmp_path: Path) -> None:
    copy_model_files(tiny_vlm, tmp_path)
    check_model_folder(tmp_path)
    damage(tmp_path)  # type: ignore[operator]
    with pytest.raises(UserError, match=message):
        check_model_folder(tmp_path)


@pytest.mark.parametrize("link", [False, True])
def test_a_file_of_the_machine_never_becomes_one_of_the_model(link: bool, tiny_vlm: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(tiny_vlm, source)
    target.mkdir()
    (source / "vocab.txt").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match=r"vocab\.txt leads out of .*source"):
        copy_model_files(source, target, link=link)
    assert not (target / "vocab.txt").exists()

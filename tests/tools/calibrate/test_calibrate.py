"""The instrument that measures on a GPU, as far as a CPU can try it."""

import difflib
import json
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner, Result

from stages.core.errors import OutOfMemory, UserError
from stages.kit.memory.calibration import SHIPPED_PATH, Calibration, load_calibration
from stages.kit.planning.prediction import Prediction
from tools.calibrate import __main__ as calibrate
from tools.calibrate import child, work
from tools.calibrate import settings as calibration_settings
from tools.calibrate.child import for_device, forecast
from tools.calibrate.children import ChildFailed, Children, Task
from tools.calibrate.measured import CudaMeter, DeviceFacts, Measured, device_facts, with_contents
from tools.calibrate.outcomes import (
    FLOOR,
    Forecast,
    Outcome,
    Session,
    bounds,
    comparisons,
    measured_constants,
    recalibrated,
    summary_lines,
    table_lines,
)
from tools.calibrate.settings import ON_CPU, ON_CUDA, Setting

MIB = 2**20
FACTS = DeviceFacts(
    name="NVIDIA H200",
    capability=(9, 0),
    versions="torch 2.13.0, transformers 5.23.0, bitsandbytes 0.50.2",
    total_bytes=139 * 2**30,
    context_bytes=500 * MIB,
    workspace_bytes=32 * MIB,
    workspaces=2,
    attention={"text": "FLASH_ATTENTION"},
)
MEASURED = "NVIDIA H200, 2026-12-01"


def prediction(allocated_mib: int, reserved_mib: int) -> Prediction:
    return Prediction(
        allocated_bytes=allocated_mib * MIB,
        reserved_bytes=reserved_mib * MIB,
        total_bytes=(reserved_mib + 600) * MIB,
        low_bytes=0,
        high_bytes=(reserved_mib + 700) * MIB,
        peak_phase="backward",
        phases={"load": 0, "forward": 0, "backward": allocated_mib * MIB, "step": 0},
        budget={"weights": allocated_mib * MIB},
        calibration="assumed",
    )


def measured(allocated_mib: int, reserved_mib: int, beside_mib: int = 500) -> Measured:
    return Measured(
        allocated_bytes=allocated_mib * MIB,
        reserved_bytes=reserved_mib * MIB,
        total_bytes=(reserved_mib + beside_mib) * MIB,
        phases={"forward": allocated_mib * MIB},
        num_retries=0,
        step_s=0.5,
    )


def outcome(name: str, exact: Prediction | None = None, **amounts: Any) -> Outcome:
    scaled = prediction(1000, 1100)
    predicted = Forecast(layers=(28, 32), scaled=scaled, exact=exact or scaled)
    return Outcome(setting=name, forecast=predicted, measured=measured(**amounts))


def session_of(*outcomes: Outcome) -> Session:
    return Session(facts=FACTS, outcomes={each.setting: each for each in outcomes})


def calibrated(*arguments: str) -> Result:
    return CliRunner().invoke(calibrate.main, ["--device", "cpu", *arguments])


class TestTheWholeRunOnACpu:
    """One setting through all of it: children, the line of JSON, the table, a calibration file."""

    def test_a_run_measures_compares_writes_and_does_not_measure_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        only = ON_CPU[:1]
        monkeypatch.setattr(calibrate, "settings_for", lambda _, *, paged: only)
        monkeypatch.setattr(calibrate, "facts_of", lambda *_: device_facts("cpu"))  # a child less to wait for
        path = tmp_path / "calibration.yaml"
        path.write_text(SHIPPED_PATH.read_text())
        arguments = ("--results-dir", str(tmp_path / "results"), "--calibration", str(path))
        done = calibrated(*arguments)
        assert done.exit_code == 0, done.output
        session = Session.read(tmp_path / "results/cpu.jsonl")
        assert session is not None
        (comparison,) = comparisons(session)
        assert comparison.layers == (2, 2)
        assert abs(comparison.error("allocated")) < 0.01
        assert load_calibration(path).allocated_error_high.measured.startswith("CPU, ")
        assert load_calibration(path).context_mib.measured == "assumed"  # a CPU has none
        assert only[0].name in done.output

        monkeypatch.delattr(Children, "run")  # as everything is in the file
        assert calibrated(*arguments).exit_code == 0


class FakeChildren:
    """Answers as children do, at once."""

    def __init__(self, answers: dict[tuple[str, str], Any]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str]] = []
        self.stopped = False

    def run(self, task: Task) -> str:
        self.asked.append((task.job, task.setting))
        answer = self.answers.get((task.job, task.setting), self.answers.get((task.job, "")))
        if isinstance(answer, Exception):
            raise answer
        return json.dumps(answer)

    def stop(self) -> None:
        self.stopped = True


FORESEEN = asdict(Forecast(layers=(28, 32), scaled=prediction(1000, 1100), exact=prediction(1000, 1100)))
FIRST, SECOND, THIRD = [setting for setting in ON_CUDA if setting.attn == "sdpa"][:3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cuda.jsonl"


def run_settings(session: Session, path: Path, children: FakeChildren, *, seconds: float = 60.0) -> None:
    work.measure_settings(
        (FIRST, SECOND, THIRD),
        session,
        path,
        children,  # type: ignore[arg-type]
        device="cuda",
        workers=2,
        deadline=time.monotonic() + seconds,
    )


class TestSettings:
    def test_what_goes_wrong_is_noted_and_the_run_goes_on(self, path: Path) -> None:
        children = FakeChildren(
            {
                ("predict", ""): FORESEEN,
                ("predict", SECOND.name): ChildFailed("no such kernel"),
                ("measure", FIRST.name): OutOfMemory("out of memory"),
                ("measure", THIRD.name): asdict(measured(1000, 1100)),
            }
        )
        run_settings(Session.begin(FACTS, path), path, children)
        read = Session.read(path)
        assert read is not None
        assert [(name, each.problem) for name, each in read.outcomes.items()] == [
            (FIRST.name, "out of memory"),
            (SECOND.name, "failed: not predicted: no such kernel"),
            (THIRD.name, ""),
        ]
        assert children.stopped

    def test_only_what_failed_is_tried_again_and_after_what_is_new(self, path: Path) -> None:
        session = Session.begin(FACTS, path)
        session.keep(Outcome(setting=FIRST.name, problem="failed: a bug that is mended"), path)
        session.keep(Outcome(setting=SECOND.name, problem="out of memory"), path)
        children = FakeChildren({("predict", ""): FORESEEN, ("measure", ""): asdict(measured(1000, 1100))})
        run_settings(Session.begin(FACTS, path), path, children)
        assert [name for job, name in children.asked if job == "measure"] == [THIRD.name, FIRST.name]

    def test_after_its_time_nothing_starts(self, path: Path) -> None:
        children = FakeChildren({("predict", ""): FORESEEN})
        run_settings(Session.begin(FACTS, path), path, children, seconds=-1)
        assert [job for job, _ in children.asked if job == "measure"] == []
        assert children.stopped

    def test_what_needs_a_missing_library_is_left_out(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(work, "find_spec", lambda _: None)
        with_flash = next(setting for setting in ON_CUDA if setting.attn == "flash_attention_2")
        found = work.outcome_of(with_flash, Future(), FakeChildren({}), "cuda")  # type: ignore[arg-type]
        assert found.problem == "left out: flash_attn is not installed"

    def test_a_changed_predictor_is_compared_with_what_was_measured(self, path: Path) -> None:
        session = Session.begin(FACTS, path)
        session.keep(outcome(FIRST.name, allocated_mib=1000, reserved_mib=1100), path)
        better = {**FORESEEN, "scaled": asdict(prediction(990, 1100))}
        children = FakeChildren({("predict", ""): better})
        work.predict_again(session, path, children, device="cuda", workers=1)  # type: ignore[arg-type]
        read = Session.read(path)
        assert read is not None
        (comparison,) = comparisons(read)
        assert comparison.error("allocated") == pytest.approx(-0.01)

    def test_a_file_of_another_device_is_not_gone_on_with(self, path: Path) -> None:
        Session.begin(FACTS, path)
        with pytest.raises(UserError, match=r"measured on NVIDIA H200 .* this is NVIDIA A10G .*begin anew by: rm "):
            Session.begin(replace(FACTS, name="NVIDIA A10G"), path)

    def test_a_damaged_file_is_refused(self, path: Path) -> None:
        Session.begin(FACTS, path)
        with path.open("a") as file:
            file.write("no JSON\n")
        with pytest.raises(UserError, match="is damaged"):
            Session.read(path)

    def test_a_line_that_a_kill_cut_off_is_left_out_and_written_over(self, path: Path) -> None:
        with path.open("w") as file:
            file.write(json.dumps(asdict(FACTS))[:20])
        session = Session.begin(FACTS, path)
        session.keep(outcome("a", allocated_mib=1000, reserved_mib=1100), path)
        with path.open("a") as file:
            file.write('{"setting": "half a li')
        read = Session.read(path)
        assert read is not None
        assert read.outcomes.keys() == {"a"}
        read.keep(outcome("b", allocated_mib=1000, reserved_mib=1100), path)
        assert len(path.read_text().splitlines()) == 3
        assert Session.begin(FACTS, path).outcomes.keys() == {"a", "b"}

    def test_managed_memory_is_used_only_when_asked_for(self) -> None:
        usual, all_ = (calibration_settings.settings_for("cuda", paged=paged) for paged in (False, True))
        assert [setting.optimizer for setting in all_ if setting not in usual] == 2 * ["paged_adamw_8bit"]

    def test_names_are_unique_and_every_plan_is_a_plan(self) -> None:
        names = [setting.name for setting in (*ON_CUDA, *ON_CPU)]
        assert len(set(names)) == len(names)
        for setting in (*ON_CUDA, *ON_CPU):
            assert calibration_settings.setting_named(setting.name).plan("cuda").parts.trained()

    def test_the_settings_cover_what_predictions_depend_on(self) -> None:
        for name, values in {
            "precision": {"bf16", "fp16", "fp32"},
            "quantization": {"none", "nf4"},
            "micro_batch": {1, 2},
            "checkpointing": {True, False},
            "optimizer": {"adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"},
            "attn": {"sdpa", "flash_attention_2"},
            "recipe": {"r1", "r2", "r4", "lora", "full", "attention-lora"},
        }.items():
            assert {getattr(setting, name) for setting in ON_CUDA} == values


class TestResult:
    def test_errors_are_those_of_the_prediction(self) -> None:
        (comparison,) = comparisons(session_of(outcome("a", allocated_mib=800, reserved_mib=1000, beside_mib=400)))
        assert comparison.error("allocated") == pytest.approx(0.25)
        assert comparison.error("reserved") == pytest.approx(0.10)
        assert comparison.error("total") == pytest.approx(1500 / 1400 - 1)  # with the context as measured, not assumed

    def test_bounds_are_wider_than_the_worst_that_was_seen(self) -> None:
        session = session_of(
            outcome("a", allocated_mib=900, reserved_mib=1100),
            outcome("b", allocated_mib=1080, reserved_mib=1210),
        )
        assert bounds(comparisons(session)) == {
            "allocated_error_low": -0.11,
            "allocated_error_high": 0.09,
            "reserved_error_low": -FLOOR,
            "reserved_error_high": 0.11,
        }

    def test_bounds_hold_for_both_ways_to_predict(self) -> None:
        session = session_of(
            outcome("a", exact=prediction(1250, 1100), allocated_mib=1000, reserved_mib=1100),
        )
        assert bounds(comparisons(session))["allocated_error_low"] == -0.21

    def test_bounds_have_a_floor(self) -> None:
        found = bounds(comparisons(session_of(outcome("a", allocated_mib=1000, reserved_mib=1100))))
        assert set(found.values()) == {-FLOOR, FLOOR}

    def test_the_totals_errors_count_with_the_reserved_ones(self) -> None:
        session = session_of(
            *(outcome(name, allocated_mib=1000, reserved_mib=1100, beside_mib=500) for name in "abc"),
            outcome("d", allocated_mib=1000, reserved_mib=1100, beside_mib=900),
        )
        assert bounds(comparisons(session))["reserved_error_high"] == pytest.approx(0.26)

    def test_the_context_is_the_median_of_the_settings(self) -> None:
        session = session_of(
            *(outcome(str(mib), allocated_mib=1, reserved_mib=2, beside_mib=mib) for mib in (400, 450, 900))
        )
        assert measured_constants(session) == {
            "context_mib": 450.0,
            "cublas_workspaces": 2,
            "cublas_workspace_hopper_mib": 32.0,
        }

    def test_a_workspace_that_a_stage_asked_for_is_no_default_of_older_cards(self) -> None:
        session = replace(session_of(), facts=replace(FACTS, capability=(8, 6)))
        assert set(measured_constants(session)) == {"context_mib", "cublas_workspaces"}

    def test_the_table_has_every_setting_and_what_went_wrong(self) -> None:
        session = session_of(
            outcome("a", allocated_mib=800, reserved_mib=1000), Outcome(setting="b", problem="out of memory")
        )
        lines = table_lines(session)
        assert "+25.0%" in lines[2]
        assert "28+32" in lines[2]
        assert lines[3].split(maxsplit=1) == ["b", "out of memory"]
        assert "predicted to fit, and did not: b" in summary_lines(session)
        assert summary_lines(session)[0] == "allocated: median error 25.0%, worst 25.0% of 1 settings"


class TestWriting:
    VALUES = {"context_mib": 512.5, "cublas_workspaces": 2, "reserved_error_low": -0.041}  # noqa: RUF012

    def test_only_values_and_their_origin_change(self) -> None:
        before = SHIPPED_PATH.read_text()
        after = recalibrated(before, self.VALUES, MEASURED)
        changed = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] in "+-"]
        assert sorted(line for line in changed if line[0] == "+") == sorted(
            ["+   value: 512.5", "+   value: -0.041", *3 * [f"+   measured: {MEASURED}"]]
        )

    def test_what_is_written_loads(self, tmp_path: Path) -> None:
        path = tmp_path / "calibration.yaml"
        path.write_text(SHIPPED_PATH.read_text())
        calibrate.write_calibration(self.VALUES, MEASURED, path)
        calibration = load_calibration(path)
        assert calibration.context_mib.value == 512.5
        assert calibration.reserved_error_low.measured == MEASURED
        assert calibration.reserved_error_high == load_calibration().reserved_error_high

    def test_what_does_not_load_leaves_the_file_as_it_was(self, tmp_path: Path) -> None:
        path = tmp_path / "calibration.yaml"
        path.write_text(SHIPPED_PATH.read_text())
        with pytest.raises(UserError, match=r"context_mib\.value: input should be greater than 0"):
            calibrate.write_calibration({"context_mib": -1}, MEASURED, path)
        assert path.read_text() == SHIPPED_PATH.read_text()

    def test_a_dry_run_writes_nothing(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "calibration.yaml"
        session = session_of(outcome(FIRST.name, allocated_mib=1000, reserved_mib=1100))
        calibrate.finish(session, (FIRST,), path, dry_run=True)
        assert not path.exists()
        on = f"NVIDIA H200, torch 2.13.0, transformers {transformers.__version__}, bitsandbytes "
        assert f"context_mib: 500 ({on}" in capsys.readouterr().out

    def test_nothing_is_written_before_every_setting_was_tried(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "calibration.yaml"
        session = session_of(outcome(FIRST.name, allocated_mib=1000, reserved_mib=1100))
        calibrate.finish(session, (FIRST, SECOND), path, dry_run=False)
        assert not path.exists()
        assert "1 of 2 settings are still to be tried" in capsys.readouterr().out


class TestForecast:
    def test_layers_are_left_out_until_it_fits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def predict(plan: Any, config: Any, *_: Any, exact: bool = False) -> Prediction:
            return prediction(100 * config.num_hidden_layers, 100 * config.num_hidden_layers)

        monkeypatch.setattr(child, "predict", predict)
        setting = Setting(geometry="qwen2.5-7b", recipe="lora", max_length=64)
        task = Task(job="predict", device="cuda")
        calibration = load_calibration()
        assert forecast(setting, task, calibration).layers == (28, 0)
        assert forecast(setting, replace(task, capacity_bytes=(2100 + 700) * MIB), calibration).layers == (21, 0)
        assert forecast(setting, replace(task, capacity_bytes=(2100 + 699) * MIB), calibration).layers == (14, 0)
        assert forecast(setting, replace(task, layers=(3, 0)), calibration).layers == (3, 0)
        with pytest.raises(UserError, match=r"does not fit with 12\.5% of its layers"):
            forecast(setting, replace(task, capacity_bytes=1), calibration)

    def test_workspaces_are_part_of_what_is_predicted(self) -> None:
        task = Task(job="predict", device="cuda", workspace_bytes=8 * MIB, workspaces=3)
        calibration = for_device(load_calibration(), task)
        assert calibration.cublas_workspace_hopper_mib.num_bytes * calibration.cublas_workspaces.value == 24 * MIB
        assert for_device(load_calibration(), replace(task, workspaces=0)) == load_calibration()


class TestChildren:
    @pytest.fixture
    def children(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Children:
        monkeypatch.setenv("SECRET", "1")
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        return Children(tmp_path / "logs", gpu="GPU-1")

    def play(self, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
        """In place of the child."""
        start = subprocess.Popen
        monkeypatch.setattr(
            subprocess,
            "Popen",
            lambda command, **options: start([sys.executable, "-c", program, *command[3:]], **options),
        )

    def test_a_prediction_sees_no_gpu_and_all_have_the_environment_of_a_stage(
        self, children: Children, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        program = "import json, os, sys; open(sys.argv[2], 'w').write(json.dumps(dict(os.environ)))"
        self.play(monkeypatch, program)
        predicting = json.loads(children.run(Task(job="predict", device="cuda")))
        measuring = json.loads(children.run(Task(job="measure", device="cuda")))
        assert (predicting["CUDA_VISIBLE_DEVICES"], measuring["CUDA_VISIBLE_DEVICES"]) == ("", "GPU-1")
        assert measuring["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert "SECRET" not in measuring

    @pytest.mark.parametrize(
        ("program", "error", "message"),
        [
            ("import sys; sys.exit(79)", OutOfMemory, "^out of memory$"),
            ("import sys; sys.exit('Error: no kernel')", ChildFailed, "^no kernel "),
            ("import os; os.kill(os.getpid(), 9)", ChildFailed, "^exit code -9 "),
        ],
    )
    def test_why_a_child_ended_is_known(
        self, children: Children, monkeypatch: pytest.MonkeyPatch, program: str, error: type, message: str
    ) -> None:
        self.play(monkeypatch, program)
        with pytest.raises(error, match=message):
            children.run(Task(job="measure", device="cuda", setting="a setting"))

    def test_those_that_run_can_be_stopped(self, children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
        self.play(monkeypatch, "import time; print('here', flush=True); time.sleep(250)")
        with ThreadPoolExecutor() as pool:
            running = pool.submit(children.run, Task(job="measure", device="cuda"))
            while not children._running:
                time.sleep(0.01)
            children.stop()
            with pytest.raises(ChildFailed):
                running.result()
        with pytest.raises(ChildFailed, match="was not started"):
            children.run(Task(job="measure", device="cuda"))


class TestMeters:
    def test_a_gpus_peaks_are_kept_by_phase(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """torch.cuda's functions as they behave; `peak` is what the allocator saw since the last reset."""
        peak = {"allocated": 0, "reserved": 0}

        def reset() -> None:
            peak.update(allocated=10, reserved=100)

        for name, function in {
            "synchronize": lambda: None,
            "reset_peak_memory_stats": reset,
            "max_memory_allocated": lambda: peak["allocated"],
            "max_memory_reserved": lambda: peak["reserved"],
            "memory_reserved": lambda: 120,
            "mem_get_info": lambda: (1000 - 170, 1000),
            "memory_stats": lambda: {"num_alloc_retries": 3},
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)
        meter = CudaMeter()
        meter.start()
        for phase, allocated, reserved in (("forward", 30, 110), ("backward", 70, 150), ("step", 40, 120)):
            meter.begin(phase)  # type: ignore[arg-type]
            peak.update(allocated=allocated, reserved=reserved)
        found = meter.stop()
        assert found.phases == {"forward": 30, "backward": 70, "step": 40}
        assert (found.allocated_bytes, found.reserved_bytes, found.num_retries) == (70, 150, 3)
        assert found.total_bytes == 150 + (170 - 120)

    def test_a_batch_can_be_computed_with(self) -> None:
        text = with_contents({"input_ids": torch.zeros(2, 8, dtype=torch.long)})
        assert len(text["input_ids"].unique()) == 16
        pixels = torch.full((4, 3), torch.nan)
        with_picture = {"input_ids": torch.zeros(1, 8, dtype=torch.long), "pixel_values": pixels}
        filled = with_contents(with_picture)
        assert filled["pixel_values"].isfinite().all()
        assert filled["input_ids"].equal(with_picture["input_ids"])  # it says where the picture is


class TestQuantized:
    def test_weights_in_4_bits_are_real_ones(self) -> None:
        """bitsandbytes quantizes on a CPU too."""
        import bitsandbytes as bnb

        from tests.kit.memory.small import quantization_tensors
        from tools.calibrate.measured import random_model

        setting = Setting(geometry="qwen2.5-tiny", recipe="lora", quantization="nf4")
        config = setting.config()
        model = random_model(setting.plan("cpu"), config)
        packed = [weight for weight in model.parameters() if weight.dtype == torch.uint8]
        linears = 7 * config.num_hidden_layers
        assert len(packed) == linears
        for weight in packed:
            unpacked = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
            assert unpacked.float().std().item() == pytest.approx(0.02, rel=0.05)
        assert len(quantization_tensors(model)) == 5 * linears
        logits = model(torch.arange(8).view(1, 8)).logits
        assert logits.isfinite().all()


def test_bounds_that_calibration_has_are_all_made() -> None:
    made = bounds(comparisons(session_of(outcome("a", allocated_mib=1000, reserved_mib=1100))))
    assert set(made) == {name for name in Calibration.__dataclass_fields__ if "_error_" in name}

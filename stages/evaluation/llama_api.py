"""llama.cpp's C API (llama.h), in the library of xllamacpp 2026.10: all logits of a text at once.

Its server, which xllamacpp has an interface for, reports one token's at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int8, c_int32, c_void_p
from itertools import accumulate
from operator import and_, eq
from pathlib import Path

import numpy as np
import torch

from stages.core.errors import UserError
from stages.planning.ladder import LOGIT_ROWS


class Pointer(c_void_p):
    """To what the library alone looks into. Unlike c_void_p's, a result of this type can be an argument as it is."""


class Settings(ctypes.Structure):
    """`llama_model_params`, or `llama_context_params`, which begins with n_ctx: filled in by the library, with room."""

    _fields_ = (("n_ctx", c_int32), ("others", c_int32 * 127))


class Batch(ctypes.Structure):
    """`llama_batch`. Without positions and sequences, its tokens follow those in the cache."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        *((name, c_void_p) for name in ("embd", "pos", "n_seq_id", "seq_id")),
        ("logits", POINTER(c_int8)),
    )


RESULTS = {
    "model_default_params": Settings,
    "model_load_from_file": Pointer,
    "model_get_vocab": Pointer,
    "context_default_params": Settings,
    "init_from_model": Pointer,
    "get_memory": Pointer,
    "memory_seq_rm": c_bool,
    "get_logits": POINTER(c_float),
}
"""Functions of a result other than int or none."""

LOGGER = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
SILENT = LOGGER(lambda *_: None)


def log_probs(path: Path, sequences: Sequence[tuple[list[int], list[int]]]) -> Iterator[list[float]]:
    """Natural logarithms of the probabilities of tokens, each after those before it, sequence by sequence.

    path: of a GGUF file. sequences: token ids, and the places of the tokens to score, in order, never the first. A
    beginning that a sequence shares with the last one is not computed again.
    """
    import xllamacpp

    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    for name, result in RESULTS.items():
        getattr(library, f"llama_{name}").restype = result
    with ExitStack() as stack:
        library.llama_log_set(SILENT, None)
        model = library.llama_model_load_from_file(bytes(path), library.llama_model_default_params())
        if not model:
            raise UserError(f"llama.cpp cannot load {path}: it is damaged, or memory is short")
        stack.callback(library.llama_model_free, model)
        num_tokens = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        settings = library.llama_context_default_params()
        settings.n_ctx = max(len(ids) for ids, _ in sequences)
        context = library.llama_init_from_model(model, settings)
        if not context:
            raise UserError(f"llama.cpp has no memory for {settings.n_ctx} tokens of {path}")
        stack.callback(library.llama_free, context)
        library.llama_set_n_threads(context, *[torch.get_num_threads()] * 2)
        cached = list[int]()
        for ids, places in sequences:
            shared = sum(accumulate(map(eq, cached, ids), and_))
            start = min(shared, places[0] - 1)
            assert library.llama_memory_seq_rm(library.llama_get_memory(context), 0, start, -1)
            cached, values = ids[: places[-1]], list[float]()  # a token is predicted at the place before it
            for first in range(start, len(cached), LOGIT_ROWS):
                read = cached[first : first + LOGIT_ROWS]
                scored = [place for place in places if first < place <= first + len(read)]
                wanted = (c_int8 * len(read))(*(first + index + 1 in scored for index in range(len(read))))
                batch = Batch(n_tokens=len(read), token=(c_int32 * len(read))(*read), logits=wanted)
                assert library.llama_decode(context, batch) == 0, (first, len(ids), settings.n_ctx)
                if scored:
                    logits = np.ctypeslib.as_array(library.llama_get_logits(context), (len(scored), num_tokens))
                    table = torch.from_numpy(logits).log_softmax(dim=1)
                    values += table.gather(1, torch.tensor([[ids[place]] for place in scored]))[:, 0].tolist()
            yield values

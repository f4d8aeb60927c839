"""The packages of the extra `llamacpp`."""

from __future__ import annotations

from importlib.util import find_spec

from stages.core.errors import UserError


def require_llama_cpp() -> None:
    """Raises UserError if the packages that write GGUF and run it are not installed."""
    if find_spec("xllamacpp") is None or find_spec("gguf") is None:
        raise UserError("llama.cpp is not installed; install it with: make setup EXTRAS=llamacpp")

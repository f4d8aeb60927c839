import stages.core  # noqa: F401 - prepares the process for torch, whatever a tool imports first

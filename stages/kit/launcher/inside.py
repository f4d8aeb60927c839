"""The first process of a container: runs the stage, and ends it when the launcher is gone.

The launcher can be killed together with dvc and with the engine's client; the engine itself would then let the
container go on. The launcher therefore holds a lock (flock) for as long as it lives, on a file that the container sees.
"""

import fcntl
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

from stages.core.errors import OUT_OF_MEMORY
from stages.core.signals import GRACE_S
from stages.kit.launcher.machine import this_machine
from stages.kit.launcher.process import CONTAINER_COUNTERS, forwarded_signals, oom_kills, run_stage
from stages.kit.launcher.system_calls import FILTER_VARIABLE, forbid_system_calls, is_filtered

LAUNCHER_LOCK = Path("/run/bakeoff/launcher")
"""Where the container finds the file that the launcher keeps locked."""

READY = Path("/run/bakeoff/ready")
"""Written to when signals are no longer lost: the first process of a container ignores what it does not handle. The
content is the machine that the stage runs on, for its provenance."""


def main() -> None:
    if os.environ.pop(FILTER_VARIABLE, None) or not is_filtered():
        forbid_system_calls()
    killed_before = oom_kills(CONTAINER_COUNTERS)
    machine = json.dumps(asdict(this_machine(os.environ)))
    with forwarded_signals() as signals:
        READY.write_text(machine, encoding="utf-8")
        threading.Thread(target=end_with_launcher, daemon=True).start()
        code = run_stage(sys.argv[1:], Path.cwd(), os.environ, signals)
    # Whatever the kernel killed in here was the stage, or worked for it and made it fail.
    if code != 0 and oom_kills(CONTAINER_COUNTERS) > killed_before:
        code = OUT_OF_MEMORY
    sys.exit(code)


def end_with_launcher() -> None:
    """Wait for the launcher's end; then ask the stage to end, as a signal to the launcher would have, or kill it."""
    with LAUNCHER_LOCK.open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
        else:  # an engine in a virtual machine, as Docker Desktop's, does not see the locks of the machine around it
            print(
                "launcher: its lock does not show in this container: killed, it leaves the stage running",
                file=sys.stderr,
            )
            return
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(128 + signal.SIGKILL)  # with the first process, the kernel ends all others


if __name__ == "__main__":
    main()

"""The first process of a container: runs the stage, and ends it when the launcher is gone.

The launcher can be killed together with dvc and the engine's client; the engine would then let the container run on.
So the launcher holds a lock (flock) as long as it lives, on a file that the container sees.
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
from stages.launcher.messages import say
from stages.launcher.process import CONTAINER_COUNTERS, forwarded_signals, oom_kills, run_stage, this_machine

LAUNCHER_LOCK = Path("/run/bakeoff/launcher")
"""The container's path of the file that the launcher keeps locked."""

READY = Path("/run/bakeoff/ready")
"""Written once signals are handled: the first process of a container ignores signals that it does not handle. The
content is the machine that the stage runs on, for its provenance."""

STATUS = Path("/proc/self/status")


def main() -> None:
    if "\nSeccomp:\t2\n" not in STATUS.read_text(encoding="utf-8"):
        sys.exit(
            "launcher: no seccomp filter is active in this container, so a stage could gain rights; "
            "remove seccomp=unconfined from the engine's configuration, or run without a container: "
            "BAKEOFF_ENGINE=process"
        )
    umask, *command = sys.argv[1:]
    os.umask(int(umask, 8))
    killed_before = oom_kills(CONTAINER_COUNTERS)
    machine = json.dumps(asdict(this_machine(os.environ)))
    with forwarded_signals() as signals:
        READY.write_text(machine, encoding="utf-8")
        threading.Thread(target=end_with_launcher, daemon=True).start()
        code = run_stage(command, Path.cwd(), os.environ, signals)
    # A process that the kernel killed in here was the stage, or one that the stage could not do without.
    if code != 0 and oom_kills(CONTAINER_COUNTERS) > killed_before:
        code = OUT_OF_MEMORY
    sys.exit(code)


def end_with_launcher() -> None:
    """Wait for the launcher's end; then ask the stage to end, as a signal to the launcher would, and later kill it."""
    with LAUNCHER_LOCK.open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
        else:  # an engine in a virtual machine, such as Docker Desktop, does not see the locks of the host
            say("the container does not see the launcher's lock; if that is killed, the stage runs on")
            return
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(128 + signal.SIGKILL)  # the kernel ends all other processes with the first one


if __name__ == "__main__":
    main()

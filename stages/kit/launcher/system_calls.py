"""System calls that a stage may not make, in a container whose engine allows all of them.

Apptainer filters none, and its own profile allows `unshare`: a process could make a user namespace, in which it has
every capability, or read the kernel's keyrings, which no namespace hides. Docker and podman forbid the same.
"""

import ctypes
import errno
import os
import platform
import struct
from pathlib import Path

CLONE_NEWUSER = 0x10000000

FORBIDDEN = {
    "x86_64": {
        "clone": 56,
        "unshare": 272,
        "setns": 308,
        "clone3": 435,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "bpf": 321,
        "perf_event_open": 298,
        "userfaultfd": 323,
        "io_uring_setup": 425,
        "io_uring_enter": 426,
        "io_uring_register": 427,
    },
    "aarch64": {
        "clone": 220,
        "unshare": 97,
        "setns": 268,
        "clone3": 435,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "bpf": 280,
        "perf_event_open": 241,
        "userfaultfd": 282,
        "io_uring_setup": 425,
        "io_uring_enter": 426,
        "io_uring_register": 427,
    },
}
"""By number. `clone` and `unshare` only where they make a user namespace; of `clone3` that cannot be seen, and the C
library uses `clone` where the kernel has none."""

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH of linux/audit.h."""

# linux/seccomp.h, linux/filter.h, linux/prctl.h
LOAD, EQUAL, GREATER_EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
X32 = 0x40000000
NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER = 38, 22, 2


FILTER_VARIABLE = "BAKEOFF_FILTER"
"""Set by an engine that never filters system calls. A filter that is there all the same is that of a service or a pod
around it, which may forbid other things."""


def is_filtered() -> bool:
    """Whether some filter holds for this process; Docker may be told to set none."""
    return "\nSeccomp:\t2\n" in Path("/proc/self/status").read_text(encoding="utf-8")


def forbid_system_calls() -> None:
    """For this process and all that it starts, beside what a filter around it forbids."""
    program = filter_program(platform.machine())
    buffer = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    argument = Program(len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, *arguments in ((NO_NEW_PRIVILEGES, 1, 0, 0, 0), (SET_SECCOMP, FILTER, ctypes.byref(argument))):
        if libc.prctl(option, *arguments) != 0:
            raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def filter_program(machine: str) -> bytes:
    """In the kernel's classic BPF (kernel.org, Seccomp BPF). A jump's two numbers are instructions to skip."""
    numbers = FORBIDDEN[machine]

    def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    program = [
        instruction(LOAD, ARCHITECTURE),
        instruction(EQUAL, ARCHITECTURES[machine], 1, 0),
        instruction(RETURN, KILL),
        instruction(LOAD, NUMBER),
        instruction(GREATER_EQUAL, X32, 0, 1),
        instruction(RETURN, FAIL | errno.ENOSYS),
        instruction(EQUAL, numbers["clone3"], 0, 1),
        instruction(RETURN, FAIL | errno.ENOSYS),
    ]
    for name, number in numbers.items():
        if name in ("clone", "unshare"):
            program += [
                instruction(EQUAL, number, 0, 4),
                instruction(LOAD, FIRST_ARGUMENT),
                instruction(ANY_BIT, CLONE_NEWUSER, 0, 1),
                instruction(RETURN, FAIL | errno.EPERM),
                instruction(RETURN, ALLOW),
            ]
        else:
            program += [instruction(EQUAL, number, 0, 1), instruction(RETURN, FAIL | errno.EPERM)]
    return b"".join((*program, instruction(RETURN, ALLOW)))

"""Run a command in a network that has nothing but the loopback interface.

Ray listens at the address of the machine, even in tests. In such a network, nobody else can reach
it. ``python -m tests.support.loopback COMMAND`` runs a command there. If the machine allows no such
network, the command runs in the usual one, and the tests of Ray are skipped.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys

GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS and IFF_UP of Linux
REQUEST = "16sh"
UNSHARE = ("unshare", "--map-root-user", "--net")


def is_loopback_only() -> bool:
    """Whether this process has no network interface but the loopback interface."""
    return [name for _, name in socket.if_nameindex()] == ["lo"]


def enable_loopback() -> None:
    import fcntl  # Linux and macOS have it

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        answer = fcntl.ioctl(control, GET_FLAGS, struct.pack(REQUEST, b"lo", 0))
        flags = struct.unpack(REQUEST, answer)[1]
        fcntl.ioctl(control, SET_FLAGS, struct.pack(REQUEST, b"lo", flags | UP))


def can_unshare() -> bool:
    return (
        shutil.which(UNSHARE[0]) is not None
        and subprocess.run([*UNSHARE, "true"], stderr=subprocess.DEVNULL, check=False).returncode
        == 0
    )


def main(command: list[str]) -> None:
    if is_loopback_only():
        enable_loopback()
    elif can_unshare():
        os.execvp(UNSHARE[0], [*UNSHARE, sys.executable, "-m", __spec__.name, *command])
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])

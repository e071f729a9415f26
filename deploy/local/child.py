"""Becomes another program, tied to the life of the process that started it.

Run as a script, `python -I -S child.py PARENT_PID DEATH_SIGNAL UID GID -- ARGV…`. It imports nothing of the project, so
that it costs milliseconds. Doing the same after fork in the parent (`preexec_fn`) is unsafe in a parent with threads.

UID and GID are `-` to stay who we are. They are numbers only for Postgres under root, which refuses to run as root:
the process becomes that user. Where that user could not enter the folder of the program or of the data (a checkout
below a private folder), it keeps the one capability of root that lets it read and enter folders.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1
PR_SET_KEEPCAPS = 8
PR_SET_SECUREBITS = 28
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
SECBIT_NO_SETUID_FIXUP = 1 << 2  # without it, access(2) ignores capabilities and initdb finds no postgres
CAPABILITY_VERSION_3 = 0x20080522
CAP_DAC_OVERRIDE = 1
CAP_DAC_READ_SEARCH = 2


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapabilitySet(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def may_enter(path: str) -> bool:
    """Whether any user may enter every folder above `path`."""
    folder = os.path.dirname(os.path.realpath(path))  # noqa: PTH120 - pathlib costs 10 ms to import here
    while True:
        if not os.stat(folder).st_mode & 0o001:  # noqa: PTH116 - as above
            return False
        if folder == "/":
            return True
        folder = os.path.dirname(folder)  # noqa: PTH120 - as above


def become(libc: ctypes.CDLL, uid: int, gid: int, program: str) -> None:
    """Change to `uid` and `gid`, keeping the right to enter folders if `program` or our folder needs it."""
    private = not (may_enter(program) and may_enter(os.path.join(os.getcwd(), "data")))  # noqa: PTH118,PTH109 - as above
    if private:
        libc.prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0)
        libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
    if not private:
        return
    for capability in (CAP_DAC_READ_SEARCH, CAP_DAC_OVERRIDE):  # containers often have only the second
        header = _CapabilityHeader(CAPABILITY_VERSION_3, 0)
        sets = (_CapabilitySet * 2)()
        sets[0].effective = sets[0].permitted = sets[0].inheritable = 1 << capability
        if libc.capset(ctypes.byref(header), ctypes.byref(sets)) == 0:
            libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability, 0, 0)
            return
    sys.exit(f"{program} cannot be reached by user {uid}: run as an ordinary user, or from a folder everyone may enter")


def main() -> None:
    """Tie this process to its parent and become the program."""
    parent, death_signal, uid, gid, separator, *argv = sys.argv[1:]
    if separator != "--" or not argv:
        sys.exit("usage: child.py PARENT_PID DEATH_SIGNAL UID GID -- ARGV...")
    libc = ctypes.CDLL(None, use_errno=True)
    if uid != "-":
        become(libc, int(uid), int(gid), argv[0])
    # After the change of user, which would clear it.
    libc.prctl(PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit("the supervisor died before its child started")
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.exit(f"{argv[0]} cannot be started: {error.strerror}")


if __name__ == "__main__":
    main()

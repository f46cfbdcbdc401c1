"""Linux system calls that Python 3.11 does not offer, and the users that programs run as.

For the daemon and its supervisors, so it imports the standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
NAMESPACE_FLAGS = {
    "mnt": CLONE_NEWNS,
    "cgroup": CLONE_NEWCGROUP,
    "uts": CLONE_NEWUTS,
    "ipc": CLONE_NEWIPC,
    "user": CLONE_NEWUSER,
    "pid": CLONE_NEWPID,
    "net": CLONE_NEWNET,
}
"""By the names in /proc/PID/ns."""
ALL_NAMESPACES = sum(NAMESPACE_FLAGS.values())
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 2, 4, 8, 32
_MS_BIND, _MS_REC, _MS_SLAVE = 4096, 16384, 1 << 19
_MNT_DETACH = 2
# The same numbers on every machine.
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_T_EMPTY_PATH = 1, 4, 0x40
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV, _MOUNT_ATTR_IDMAP = 1, 2, 4, 0x100000
_NS_GET_USERNS = 0xB701
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 4, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
_NUM_CAPABILITIES = 64
# systemd's table of user ids leaves 0x70000000 to 0x7fffffff unused; process ids are below 2**22.
_FIRST_UID = 0x70000000
_NOBODY = 65534

_IPC_RMID = 0
_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Leave namespaces. Raises: OSError."""
    _checked(_libc.unshare(flags), "unshare")


def enter_namespaces(descriptor: int, flags: int) -> None:
    """Join namespaces of a process (a pidfd), or one by its own descriptor. Raises: OSError."""
    _checked(_libc.setns(descriptor, flags), "setns")


def own_mounts() -> None:
    """Enter a new mount namespace that still receives the host's later mounts. Raises: OSError."""
    unshare(CLONE_NEWNS)
    _mount(None, "/", None, _MS_REC | _MS_SLAVE, None)


def bind(source: str, target: str) -> None:
    """Show a directory or file at another place. Raises: OSError."""
    _mount(source, target, None, _MS_BIND | _MS_REC, None)


def mount_tmpfs(target: str, options: str) -> None:
    """Mount an empty file system in memory. Raises: OSError."""
    _mount("tmpfs", target, "tmpfs", _MS_NOSUID | _MS_NODEV, options)


def mount_overlay(lower: str, upper: str, work: str, target: str, *, has_host_root: bool = True) -> None:
    """Mount an overlay: `lower` with changes in `upper`. Raises: OSError.

    Without the host's root the overlay keeps its marks in user attributes, which tmpfs has since Linux 6.6.
    """
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    # Device files of an image would open the host's devices, its disks too.
    flags = _MS_NOSUID | _MS_NODEV
    _mount("overlay", target, "overlay", flags, options + ("" if has_host_root else ",userxattr"))


def limit_files(pid: int, places: Mapping[str, bool], max_files: int) -> None:
    """Limit the number of files in the tmpfs mounts of a process; their sizes stay as they are.

    `places`: mount points, and whether programs may be executed there. Raises: OSError.
    """

    def remount() -> None:
        mounts = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        if os.geteuid() != 0:
            # This user made the user namespace that owns the mounts, so it is root there.
            enter_namespaces(fcntl.ioctl(mounts, _NS_GET_USERNS), CLONE_NEWUSER)
        enter_namespaces(mounts, CLONE_NEWNS)
        for place, is_executable in places.items():
            flags = _MS_REMOUNT | _MS_NOSUID | _MS_NODEV | (0 if is_executable else _MS_NOEXEC)
            _mount("tmpfs", place, "tmpfs", flags, f"nr_inodes={max_files}")

    _do_apart("limit of files", remount)


def show_of(mounts: int, source: str, target: str, *, is_whole: bool) -> None:
    """Bind `source` of another mount namespace (the descriptor `mounts`) to `target` of this one.

    `is_whole`: including the mounts below it. Raises: OSError.
    """

    def show() -> None:
        where = os.open(target, os.O_PATH)
        own = os.open("/proc/self/ns/mnt", os.O_RDONLY)
        enter_namespaces(mounts, CLONE_NEWNS)
        tree = _clone_tree(source, is_whole=is_whole)
        enter_namespaces(own, CLONE_NEWNS)
        _attach(tree, where)

    _do_apart(f"{source} of other mounts", show)


def replace_root(
    pid: int, mount_point: str, root: str, *, kept: Sequence[str], binds: Sequence[tuple[str, str, bool]]
) -> None:
    """Replace the root of a process, and of all processes in its mount namespace.

    `mount_point`: a directory of the old root. `kept`: mount points that are moved from the old root to the
    new one. `binds`: bind mounts of the new root: path here, path inside, read-only. Raises: OSError.
    """

    def replace() -> None:
        shown = [
            (_clone_tree(source, is_whole=True, is_read_only=read_only), inside, os.path.isdir(source))
            for source, inside, read_only in binds
        ]
        tree = _clone_tree(root)
        os.umask(0o022)
        enter_namespaces(os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY), CLONE_NEWNS)
        _attach(tree, os.open(mount_point, os.O_PATH))
        moved = [(os.open(path, os.O_PATH), path, os.path.isdir(path)) for path in kept]
        old_root = os.open("/", os.O_PATH | os.O_DIRECTORY)
        os.chdir(mount_point)
        # This stacks the old root over the new one, where no path leads to it.
        _checked(_libc.pivot_root(b".", b"."), "pivot_root")
        for tree, inside, is_directory in (*moved, *shown):
            # This process is inside the new root, so a link in the image cannot lead out of it.
            os.makedirs(inside if is_directory else os.path.dirname(inside), exist_ok=True)
            if not is_directory:
                os.close(os.open(inside, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
            _attach(tree, os.open(inside, os.O_PATH))
        os.fchdir(old_root)
        _checked(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")

    _do_apart(f"root for process {pid}", replace)


def _do_apart(name: str, work: Callable[[], None]) -> None:
    """Run `work` in a fork, which may change namespaces for good. Raises: OSError."""
    child = os.fork()
    if child != 0:
        _, status = os.waitpid(child, 0)
        number = os.waitstatus_to_exitcode(status)
        if number:
            raise OSError(number, f"{name}: {os.strerror(number)}")
        return
    number = errno.EIO
    try:
        work()
        number = 0
    except OSError as error:
        number = error.errno or number
    finally:
        os._exit(number)


def mount_mapped(source: str, target: str, user_namespace: int) -> None:
    """Bind a directory, without the mounts below it, with its users mapped by a user namespace.

    Raises: OSError.
    """
    tree = _clone_tree(source)
    where = os.open(target, os.O_PATH)
    try:
        _change_mount(tree, _AT_EMPTY_PATH, struct.pack("QQQQ", _MOUNT_ATTR_IDMAP, 0, 0, user_namespace))
        _attach(tree, where)
    finally:
        os.close(tree)
        os.close(where)


def _clone_tree(source: str, *, is_whole: bool = False, is_read_only: bool = False) -> int:
    """Return a descriptor of a detached copy of a mount, or of a directory in it.

    `is_whole`: including the mounts below it; such a copy is mounted nodev and nosuid.
    """
    below = _AT_RECURSIVE if is_whole else 0
    tree: int = _libc.syscall(
        _OPEN_TREE, _AT_FDCWD, source.encode(), ctypes.c_uint(_OPEN_TREE_CLONE | os.O_CLOEXEC | below)
    )
    _checked(min(tree, 0), f"open_tree {source}")
    if is_whole:
        attributes = _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV | (_MOUNT_ATTR_RDONLY if is_read_only else 0)
        _change_mount(tree, _AT_EMPTY_PATH | below, struct.pack("QQQQ", attributes, 0, 0, 0))
    return tree


def _change_mount(tree: int, flags: int, attributes: bytes) -> None:
    size = ctypes.c_size_t(len(attributes))
    _checked(
        _libc.syscall(_MOUNT_SETATTR, tree, b"", ctypes.c_uint(flags), attributes, size), "mount_setattr"
    )


def _attach(tree: int, where: int) -> None:
    """Mount a detached tree at the directory of another descriptor."""
    flags = ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH)
    _checked(_libc.syscall(_MOVE_MOUNT, tree, b"", where, b"", flags), "move_mount")


def detach_mount(target: str) -> None:
    """Unmount lazily: at once, even with open files. Raises: OSError."""
    _checked(_libc.umount2(target.encode(), _MNT_DETACH), f"umount {target}")


def remove_ipc(uid: int, *, is_idle: bool = False) -> None:
    """Remove a user's System V shared memory, semaphores and message queues, which outlive its processes.

    `is_idle`: only what holds memory and is not attached to a process.
    """
    removals: dict[str, Callable[[int], object]] = {
        "shm": lambda number: _libc.shmctl(number, _IPC_RMID, None),
        "sem": lambda number: _libc.semctl(number, 0, _IPC_RMID),
        "msg": lambda number: _libc.msgctl(number, _IPC_RMID, None),
    }
    for kind, remove in removals.items():
        try:
            header, *lines = read_file(f"/proc/sysvipc/{kind}").splitlines()
        except OSError:
            # This kernel has no System V IPC.
            continue
        for line in lines:
            row = dict(zip(header.split(), line.split(), strict=False))
            is_kept = is_idle and (kind == "sem" or row.get("nattch", "0") != "0")
            if row["uid"] == str(uid) and not is_kept:
                remove(int(line.split()[1]))


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None) -> None:
    encoded = (None if text is None else text.encode() for text in (source, target, kind))
    data = None if options is None else options.encode()
    _checked(_libc.mount(*encoded, ctypes.c_ulong(flags), data), f"mount {target}")


def read_file(path: str | Path) -> str:
    """Return the text of a file in /proc or /sys. Raises: OSError.

    Not `Path.read_text`, which makes five more system calls.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
    finally:
        os.close(descriptor)
    return b"".join(parts).decode(errors="replace")


def read_or_empty(path: str | Path) -> str:
    """Return the text of a file in /proc or /sys; empty if it is missing or not readable."""
    try:
        return read_file(path)
    except OSError:
        return ""


def write_file(path: str | Path, text: str) -> None:
    """Write to a file in /proc or /sys. Raises: OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def close_all_but(kept: Collection[int | None]) -> None:
    """Close all descriptors of this process except `kept`."""
    # Not os.closerange: with an old C library it tries each of a billion numbers.
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):  # The listing's own descriptor is closed already.
                os.close(int(name))


def become_subreaper() -> None:
    """Become the parent of orphaned descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def hide_from_tracers() -> None:
    """Hide this process's memory, environment and descriptors from other processes of its user."""
    _prctl(_PR_SET_DUMPABLE, 0)


def open_to_tracers() -> None:
    """Undo `hide_from_tracers`: this process's files in /proc belong to its user again."""
    _prctl(_PR_SET_DUMPABLE, 1)


def forbid_privileges(kept: int = 0) -> None:
    """Rule out privileges from set-uid programs or file capabilities, for good. Raises: OSError.

    `kept`: bit mask of capabilities that stay in the bounding set.
    """
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(_NUM_CAPABILITIES):
        if kept >> capability & 1:
            continue
        # This fails for an ordinary user, who has no capability, and beyond the kernel's last one.
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)


def drop_capabilities(kept: int = 0) -> None:
    """Give up all capabilities except the bit mask `kept`. Raises: OSError."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    low, high = kept & 0xFFFFFFFF, kept >> 32
    # Effective, permitted and inheritable sets: first the lower 32 bits, then the upper.
    _checked(_libc.capset(header, (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)), "capset")


def become(uid: int, gid: int) -> None:
    """Change to another user without supplementary groups, for good. Raises: OSError."""
    if os.getgroups():
        os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


@contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """Act as another user within the block; a program executed there cannot change back. Raises: OSError.

    Does nothing if this process is not root, or `uid` is root.
    """
    if os.geteuid() != 0 or uid == 0:
        yield
        return
    if os.getgroups():
        os.setgroups([])
    os.setresgid(uid, uid, 0)
    os.setresuid(uid, uid, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)


def sandbox_uid(pid: int) -> tuple[int, bool]:
    """Return the user for programs of the sandbox that `pid` supervises, and whether it is private to them.

    Units: ids of this user namespace. An ordinary user gets its own id.
    """
    own = os.geteuid()
    if own != 0:
        return own, False
    try:
        ranges = [line.split() for line in read_file("/proc/self/uid_map").splitlines()]
    except OSError:
        # A kernel without user namespaces: every id exists.
        return _FIRST_UID + pid, True
    for uid, is_private in ((_FIRST_UID + pid, True), (_NOBODY, False)):
        if any(int(first) <= uid < int(first) + int(length) for first, _, length in ranges):
            return uid, is_private
    return own, False


def count_user_tasks(uid: int) -> int:
    """Return how many processes and threads a user has on this host."""
    num_tasks = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == uid:
                    num_tasks += len(os.listdir(Path("/proc", name, "task")))
    return num_tasks


def can_reach(path: str) -> bool:
    """Whether any user can enter the directories above a path and read it."""
    try:
        mode = os.stat(path).st_mode
        above = [os.stat(parent).st_mode for parent in Path(path).parents]
    except OSError:
        return False
    needed = 0o005 if os.path.isdir(path) else 0o004
    return mode & needed == needed and all(parent & 0o001 for parent in above)


def _prctl(option: int, value: int) -> None:
    _checked(_libc.prctl(option, value, 0, 0, 0), f"prctl {option}")


def _checked(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")

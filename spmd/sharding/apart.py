"""Work that may crash, in a child process: a kernel given shards that don't belong together divides by zero or corrupts memory.

The child is a fork. Ops that a user's code has registered exist in this process only, and a spawned one would have to run the user's script again to get
them. A fork beside CUDA and communication threads is safe as long as it uses neither: the child closes every file it has inherited, so that no socket
and no driver can be reached from it, runs on the CPU with one thread, frees nothing of its parent's, and leaves without clean-up. A lock that another
thread held at the fork can only make it wait, until its time is over.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

T = TypeVar("T")


class Failed(Exception):
    """The work raised, crashed, or took too long; the message says which."""


def run_apart(work: Callable[[], T], seconds: float) -> T:
    """What `work` returns, computed in a child process. Its result must be picklable.

    Raises:
        Failed: it raised, crashed, or took more than `seconds`.
    """
    if not hasattr(os, "fork"):
        raise Failed("this system can't fork")
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of threads; see above
        child = os.fork()
    if child == 0:
        run_child(work, writer)
    os.close(writer)
    try:
        data, late = receive(reader, time.monotonic() + seconds)
    finally:
        os.close(reader)
        status = reap(child)
    if late:
        raise Failed(f"it took more than {seconds:g} s")
    if not data:
        raise Failed(f"it crashed: {signal.Signals(status).name if status else 'it left no result'}")
    value, error = pickle.loads(data)
    if error:
        raise Failed(error)
    return value


def receive(reader: int, deadline: float) -> tuple[bytes, bool]:
    """All bytes until the other end closes; whether the deadline came first."""
    data = b""
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return data, True
        block = os.read(reader, 1 << 16)
        if not block:
            return data, False
        data += block


def reap(child: int) -> int:
    """End the child and return the signal that it died of, 0 if none."""
    try:
        done, status = os.waitpid(child, os.WNOHANG)
        if not done:
            time.sleep(0.01)  # its pipe is closed: it's dying by itself, and of what is worth knowing
            done, status = os.waitpid(child, os.WNOHANG)
        if not done:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return 0
    except ChildProcessError:  # the user's program ignores SIGCHLD
        return 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def run_child(work: Callable[[], Any], writer: int) -> NoReturn:
    code = 1
    try:
        gc.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.closerange(3, writer)
        os.closerange(writer + 1, os.sysconf("SC_OPEN_MAX"))
        torch.set_num_threads(1)
        try:
            with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
                result = work(), ""
        except Exception as error:
            result = None, f"{type(error).__name__}: {error}"[:500]
        data = pickle.dumps(result)
        while data:
            data = data[os.write(writer, data) :]
        code = 0
    finally:
        os._exit(code)

"""One pool of gloo workers for a whole test session.

A job is a module-level function; `World.run(fn, W, *args)` calls it on the first W workers, each a rank
of a fresh gloo group (none when W is 1), and returns what each rank returned. A rank that raises, dies or
hangs is reported with its rank, traceback or signal and the tail of its output; the others are ended
after a grace period and only workers that were lost are replaced.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

SIZE = 4  # workers in the pool, so the largest world
COLLECTIVE_TIMEOUT = 60.0  # seconds before gloo itself gives up
GRACE = 5.0  # seconds the other ranks have to notice a failure by themselves, where a test asks for it
QUICK = 1.0  # and where it doesn't
END = b"end"


@dataclass(frozen=True)
class Failure:
    """One rank's exception, death or hang. `kinds` are the class names of the exception, most derived first."""

    rank: int
    kinds: tuple[str, ...]
    message: str
    details: str = field(repr=False)
    seconds: float

    def is_a(self, kind: str) -> bool:
        return kind in self.kinds


class RanksFailed(Exception):
    """Some ranks of a job failed; `failures` holds each of them. The message begins with the first to fail."""

    def __init__(self, failures: list[Failure]) -> None:
        self.failures = failures
        first = sorted(failures, key=lambda failure: failure.seconds)
        super().__init__("\n".join(_tell(failure) for failure in first))


def _tell(failure: Failure) -> str:
    text = failure.details if failure.message in failure.details else f"{failure.message}\n{failure.details}"
    return f"--- rank {failure.rank}: {failure.kinds[0]} after {failure.seconds:.1f} s\n{text}"


@dataclass(frozen=True)
class _Job:
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    size: int
    store: str


def rank() -> int:
    """This process's rank; 0 without a process group."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """The size of this process's world; 1 without a process group."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


# ---- the worker's side


def _serve(conn: Connection, log: str | None) -> None:
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = io.TextIOWrapper(open(1, "wb", 0, closefd=False), write_through=True)  # noqa: SIM115  open as long as the process
        sys.stderr = io.TextIOWrapper(open(2, "wb", 0, closefd=False), write_through=True)  # noqa: SIM115  open as long as the process
    gc.freeze()  # what came with the fork is never garbage: collecting after each job stays cheap
    gc.set_threshold(100_000, 20, 20)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, file=2)
    while True:
        try:
            data = conn.recv_bytes()
        except EOFError:
            return
        conn.send_bytes(_perform(data))
        with contextlib.suppress(EOFError):
            conn.recv_bytes()  # every rank has answered: the group may go
        _clean()


def _perform(data: bytes) -> bytes:
    started = time.monotonic()
    job_rank = -1
    try:
        job: _Job = pickle.loads(data)
        job_rank = job.rank
        _join(job)
        return pickle.dumps(job.fn(*job.args))
    except BaseException as error:  # even SystemExit and KeyboardInterrupt are a rank's answer
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        seconds = time.monotonic() - started
        return pickle.dumps(Failure(job_rank, kinds, str(error), traceback.format_exc(), seconds))


def _join(job: _Job) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if job.size > 1:
        store = dist.FileStore(job.store, job.size)
        limit = timedelta(seconds=COLLECTIVE_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.size, timeout=limit)


def _clean() -> None:
    """Leave nothing of a job behind: group, caches, global switches, garbage."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import debug

    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    debug._clear_sharding_prop_cache()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)


# ---- the session's side


@dataclass
class _Worker:
    process: Any
    conn: Connection
    log: str | None

    def tail(self, start: int) -> str:
        if self.log is None:
            return ""
        with open(self.log, errors="replace") as file:
            file.seek(start)
            text = file.read()[-8000:]
        return f"output:\n{text}" if text.strip() else ""

    def written(self) -> int:
        return os.path.getsize(self.log) if self.log is not None and os.path.exists(self.log) else 0


class World:
    """A pool of SIZE workers, started on first use. With `show=True` workers write to this terminal."""

    def __init__(self, show: bool = False) -> None:
        self._show = show
        self._folder = tempfile.mkdtemp(prefix="spmd-world-")
        self._workers: list[_Worker | None] = [None] * SIZE
        self._jobs = 0
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.oracle.preload"])

    def run(self, fn: Callable[..., Any], W: int, *args: Any, catch: bool = False, timeout: float = 300.0) -> list[Any]:
        """Call `fn(*args)` on W ranks and return their results in order.

        Raises:
            RanksFailed: some rank raised, died or was still running after `timeout` seconds. With `catch`
                nothing is raised and each such rank's result is its `Failure`.
        """
        self._jobs += 1
        store = os.path.join(self._folder, f"store-{self._jobs}")
        workers = [self._worker(index) for index in range(W)]
        starts = [worker.written() for worker in workers]
        for index, worker in enumerate(workers):
            worker.conn.send_bytes(pickle.dumps(_Job(fn, args, index, W, store)))
        results = self._collect(workers, starts, timeout, GRACE if catch else QUICK)
        failures = [result for result in results if isinstance(result, Failure)]
        if failures and not catch:
            raise RanksFailed(failures)
        return results

    def close(self) -> None:
        for worker in self._workers:
            if worker is not None:
                worker.conn.close()
        for worker in self._workers:
            if worker is not None:
                worker.process.join(5)
                if worker.process.is_alive():
                    worker.process.kill()
        self._workers = [None] * SIZE
        shutil.rmtree(self._folder, ignore_errors=True)

    def _worker(self, index: int) -> _Worker:
        worker = self._workers[index]
        if worker is not None and worker.process.is_alive():
            return worker
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        ours, theirs = self._context.Pipe()
        log = None if self._show else os.path.join(self._folder, f"worker-{index}-{self._jobs}.log")
        process = self._context.Process(target=_serve, args=(theirs, log), daemon=True)
        process.start()
        theirs.close()
        worker = self._workers[index] = _Worker(process, ours, log)
        return worker

    def _collect(self, workers: list[_Worker], starts: list[int], timeout: float, grace: float) -> list[Any]:
        began = time.monotonic()
        deadline = began + timeout
        results: dict[int, Any] = {}
        released = False
        while len(results) < len(workers):
            waiting = [index for index in range(len(workers)) if index not in results]
            handles = [workers[index].conn for index in waiting] + [
                workers[index].process.sentinel for index in waiting
            ]
            ready = wait(handles, max(0.0, deadline - time.monotonic()))
            seconds = time.monotonic() - began
            for index in waiting:
                if workers[index].conn in ready or workers[index].process.sentinel in ready:
                    first = not any(isinstance(result, Failure) for result in results.values())
                    results[index] = self._answer(index, workers[index], starts[index], seconds)
                    if isinstance(results[index], Failure) and first:
                        deadline = min(deadline, time.monotonic() + grace)
                    if released:
                        self._release(index)
            if not ready and not released:  # closing the answered ranks' connections wakes most of their peers
                released, deadline = True, time.monotonic() + GRACE
                for index in results:
                    self._release(index)
            elif not ready:
                for index in waiting:
                    results[index] = self._kill(index, workers[index], starts[index], seconds)
        if not released:
            for index in results:
                self._release(index)
        return [results[index] for index in range(len(workers))]

    def _release(self, index: int) -> None:
        worker = self._workers[index]
        if worker is not None:
            with contextlib.suppress(OSError):
                worker.conn.send_bytes(END)

    def _answer(self, index: int, worker: _Worker, start: int, seconds: float) -> Any:
        try:
            result = pickle.loads(worker.conn.recv_bytes())
        except (EOFError, OSError):
            return self._lost(index, worker, start, seconds, _cause(worker.process))
        if isinstance(result, Failure):
            return replace(result, rank=index, details=result.details + worker.tail(start))
        return result

    def _kill(self, index: int, worker: _Worker, start: int, seconds: float) -> Failure:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid, signal.SIGUSR1)  # its stack goes to its output
        worker.process.join(0.5)
        worker.process.kill()
        return self._lost(index, worker, start, seconds, "still running, so killed")

    def _lost(self, index: int, worker: _Worker, start: int, seconds: float, cause: str) -> Failure:
        worker.process.join(5)
        worker.conn.close()
        self._workers[index] = None
        return Failure(index, ("Lost",), cause, worker.tail(start), seconds)


def _cause(process: Any) -> str:
    process.join(5)
    code = process.exitcode
    if code is not None and code < 0:
        return f"died of {signal.Signals(-code).name}"
    return f"exited with code {code}"

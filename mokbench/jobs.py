"""One rank's work: connects to the launcher, runs the groups it is sent, reports what happened."""

import os
import traceback
from multiprocessing.connection import Client, Connection
from typing import Any

import torch
import torch.distributed as dist

from mokbench.bench import Bench, open_bench
from mokbench.config import MeasureOptions
from mokbench.fabric.group import PeerLostError
from mokbench.group import GroupRun
from mokbench.layer import Layer
from mokbench.measure.signaling import signal_samples
from mokbench.workload import Cell, Workload

# The layer of the cells and that of min_step; more would hold weights nobody needs.
_MAX_LAYERS = 2


class Worker:
    """The rank's state across jobs."""

    def __init__(self, bench: Bench, connection: Connection) -> None:
        self._bench, self._fabric = bench, bench.fabric
        self._connection = connection
        self._layers: dict[Workload, Layer] = {}

    def serve(self) -> None:
        """Answer jobs until told to stop; a job that raises ends the worker."""
        answers = {"signals": self._signals, "rates": self._rates, "cells": self._cells}
        while (job := self._connection.recv())["kind"] != "stop":
            try:
                reply = answers[job["kind"]](job)
            except Exception as error:
                self._connection.send(("failed", failure(error)))
                # Peers may be mid-protocol, so nothing here can be trusted to close in order.
                raise
            self._connection.send(("done", reply))

    def _signals(self, job: dict[str, Any]) -> dict[str, Any] | None:
        points = signal_samples(self._fabric)
        return {"points": points} if self._fabric.rank == 0 else None

    def _rates(self, job: dict[str, Any]) -> dict[str, Any] | None:
        return self._bench.rates()

    def _cells(self, job: dict[str, Any]) -> dict[str, Any] | None:
        cells = [Cell.from_dict(cell) for cell in job["cells"]]
        options = MeasureOptions.model_validate(job["measure"])
        self._report(cells[0].id, "generate")
        layer = self._layer(cells[0].workload)
        run = GroupRun(self._bench, layer, options, self._report, job["rates"])
        facts = run.workload_facts()
        digests = self._fabric.gather(facts["routing_digest"])
        if len(set(digests)) != 1:
            raise RuntimeError(f"ranks generated different routings: {digests}")
        results = run.run(cells)
        return {"facts": facts, "results": results} if self._fabric.rank == 0 else None

    def _layer(self, workload: Workload) -> Layer:
        if workload not in self._layers:
            while len(self._layers) >= _MAX_LAYERS:
                self._layers.pop(next(iter(self._layers)))
            if self._bench.device != "cpu":
                # What torch keeps for later here, no other rank of this GPU can have.
                torch.cuda.empty_cache()
            self._layers[workload] = Layer.build(workload, self._fabric.rank, self._bench.device)
        return self._layers[workload]

    def _report(self, cell_id: str, phase: str) -> None:
        self._connection.send(("phase", cell_id, phase))


def failure(error: Exception) -> dict[str, Any]:
    """What the launcher needs to name the rank at fault."""
    kind, prefix = "error", ""
    # An expired wait of a kernel or of the twin, whose class is there only where it is built.
    fault = getattr(error, "record", None)
    if fault is not None:
        kind, fault = "fault", dict(fault)
        prefix = f"rank {fault['rank']}: "
    elif isinstance(error, PeerLostError):
        kind = "peer"
    text = str(error).removeprefix(prefix) or type(error).__name__
    if kind == "error":
        text = f"{type(error).__name__}: {text}"
    return {"kind": kind, "text": text, "fault": fault, "traceback": traceback.format_exc()}


def open_store(spec: dict[str, Any]) -> dist.Store:
    """The rendezvous store of these workers: a file here, a TCP store under a launcher."""
    if spec["store"]["kind"] == "file":
        return dist.FileStore(spec["store"]["path"], spec["ranks"])
    base = dist.TCPStore(spec["store"]["host"], spec["store"]["port"], is_master=False)
    return dist.PrefixStore(spec["store"]["prefix"], base)


def serve(spec: dict[str, Any]) -> None:
    """Connect, join the other ranks, answer jobs until told to stop."""
    address = spec["address"]
    connection = Client(
        tuple(address) if isinstance(address, list) else address,
        authkey=bytes.fromhex(spec["authkey"]),
    )
    connection.send(("hello", spec["rank"], os.getpid()))
    torch.set_num_threads(1)
    try:
        bench = open_bench(
            spec["fabric"],
            spec["rank"],
            spec["ranks"],
            open_store(spec),
            spec["wait_bound_s"],
            spec["shm_token"],
        )
    except Exception as error:
        connection.send(("failed", failure(error)))
        raise
    connection.send(("ready",))
    Worker(bench, connection).serve()
    bench.fabric.close()
    connection.close()

"""What the server says and shows of itself (metrics, processor time, memory), and how busy the machine is beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.service_process import ServiceProcess


@dataclass(frozen=True, slots=True)
class Reading:
    """The server's counters at one moment, summed over labels; and all processors' time, by what became of it."""

    cpu_s: float
    totals: Mapping[str, float]
    machine_s: float
    machine_idle_s: float

    def since(self, earlier: Reading) -> Reading:
        """What was added since an earlier reading."""
        totals = {name: value - earlier.totals.get(name, 0.0) for name, value in self.totals.items()}
        return Reading(
            cpu_s=self.cpu_s - earlier.cpu_s,
            totals=totals,
            machine_s=self.machine_s - earlier.machine_s,
            machine_idle_s=self.machine_idle_s - earlier.machine_idle_s,
        )


def read_server(service: ServiceProcess) -> Reading:
    """Read all counters, and the process's user and system time."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(service.get_text("/metrics")):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    times = psutil.Process(service.pid).cpu_times()
    machine = psutil.cpu_times()
    return Reading(
        cpu_s=times.user + times.system,
        totals=totals,
        # Guests' time is counted under user as well.
        machine_s=sum(machine) - getattr(machine, "guest", 0.0) - getattr(machine, "guest_nice", 0.0),
        machine_idle_s=machine.idle + getattr(machine, "iowait", 0.0),
    )


class PeakMemory:
    """The largest resident size seen so far."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.bytes = 0

    def look(self) -> None:
        self.bytes = max(self.bytes, self._process.memory_info().rss)

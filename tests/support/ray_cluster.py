"""Ray clusters of several nodes on this machine, for tests and benchmarks.

A node has custom resources with its name, so a member with ``resources={"north": 1}`` runs there.
The cluster is in a process of its own: calls of a program to Ray can hang if the same program
starts nodes meanwhile.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

SETTINGS: Final = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "a-token-of-tests-with-enough-characters",
    "RAY_health_check_period_ms": "500",  # a lost node is noticed in seconds
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_USAGE_STATS_ENABLED": "0",
}
STORE_BYTES: Final = 80 * 2**20
"""The smallest object store that Ray allows."""

REPLY: Final = "reply: "
"""What precedes a reply in the output of the cluster's process."""


class Nodes:
    """A cluster whose head node runs nothing. This program belongs to the head.

    Args:
        names: names of the other nodes.
        cores: number of CPU cores of each of them.
    """

    def __init__(self, *names: str, cores: float = 1) -> None:
        os.environ.update(SETTINGS)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, f"{cores:g}"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self._reply()

        from adafuse_llm.ray.actors import connect

        connect(self.address)  # before other nodes exist: a program ends with its node
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        self._ask("add", name)

    def lose(self, name: str) -> None:
        """Kill a node with all that runs on it, as if its machine lost power."""
        self._ask("lose", name)

    def close(self) -> None:
        import ray

        ray.shutdown()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _ask(self, *words: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{' '.join(words)}\n")
        self._process.stdin.flush()
        self._reply()

    def _reply(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(REPLY):
                return line.removeprefix(REPLY).strip()
        raise RuntimeError("the process with the cluster has ended")


def serve(cores: float) -> None:
    """Start a cluster, and do what each line of the input says until the input ends."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes: dict[str, Any] = {}
    print(f"{REPLY}{cluster.address}", flush=True)
    for line in sys.stdin:
        action, name = line.split()
        if action == "add":
            nodes[name] = cluster.add_node(
                num_cpus=cores, resources={name: 10}, object_store_memory=STORE_BYTES
            )
        else:
            lose(cluster, nodes.pop(name))
        print(f"{REPLY}done", flush=True)
    cluster.shutdown()


def lose(cluster: Any, node: Any) -> None:
    import psutil

    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    workers = raylet.children(recursive=True)
    cluster.remove_node(node, allow_graceful=False)
    for worker in workers:
        if worker.is_running():
            worker.kill()


if __name__ == "__main__":
    serve(float(sys.argv[1]))

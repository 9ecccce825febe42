"""Ray clusters of several nodes on this machine, for tests.

A node has custom resources with its name, so a member with ``resources={"north": 1}`` runs there.
"""

from __future__ import annotations

import os
from typing import Any

SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "a-token-of-tests-with-enough-characters",
    "RAY_health_check_period_ms": "500",  # a lost node is noticed in seconds
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_ENABLE_RECORD_ACTOR_TASK_LOGGING": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
STORE_BYTES = 80 * 2**20
"""The smallest object store that Ray allows."""


class Nodes:
    """A cluster whose head node runs nothing.

    Args:
        names: names of the other nodes.
        cores: number of CPU cores of each of them.
    """

    def __init__(self, *names: str, cores: float = 1) -> None:
        os.environ.update(SETTINGS)
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._cores = cores
        self._nodes: dict[str, Any] = {}
        for name in names:
            self.add(name)

    @property
    def address(self) -> str:
        address: str = self._cluster.address
        return address

    def add(self, name: str) -> None:
        from ray.exceptions import RaySystemError

        for is_last in (False, True):
            try:
                self._nodes[name] = self._cluster.add_node(
                    num_cpus=self._cores, resources={name: 10}, object_store_memory=STORE_BYTES
                )
                return
            except RaySystemError:  # the head node does not answer in time on a busy machine
                if is_last:
                    raise

    def lose(self, name: str) -> None:
        """Kill a node with all that runs on it, as if its machine lost power."""
        import psutil

        node = self._nodes.pop(name)
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for worker in raylet.children(recursive=True):
            worker.kill()
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()

"""The options of a member that runs in a Ray actor. This module does not import Ray."""

from __future__ import annotations

import re
from typing import Any, Final

from pydantic import Field, field_validator

from adafuse_llm.config import Options

ADDRESS: Final = re.compile(r"auto|[\w.-]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}")


LEAST_CPU: Final = 0.001
"""What a member without any resources reserves, because Ray has no empty reservations."""


def check_address(address: Any) -> None:
    """Check the address of a cluster.

    Raises:
        ValueError: this is not an address.
    """
    if not isinstance(address, str) or not ADDRESS.fullmatch(address):
        raise ValueError(
            "it must be HOST:PORT of the head node, such as 10.0.0.1:6379, or auto. The machine of "
            "the engine must belong to the cluster, so ray:// is not possible"
        )


class RayOptions(Options):
    """What a member in a Ray actor needs, and how long to wait for it (`MemberSpec.ray`).

    Raises:
        InvalidOptionError: an option is unknown or out of range.
    """

    address: str | None = Field(
        default=None,
        description="Head node of the cluster as HOST:PORT, or auto for the cluster that this "
        "machine belongs to. Default: the cluster that the program is connected to, otherwise the "
        "variable RAY_ADDRESS, otherwise auto.",
    )
    num_gpus: float | None = Field(
        default=None,
        ge=0,
        description="Number of GPUs. Members can share one: 0.5 is half of one. Default: 1 if the "
        "cluster has GPUs, otherwise 0.",
    )
    num_cpus: float | None = Field(
        default=None,
        ge=0,
        description="Number of CPU cores, which is also the number of threads unless the member "
        "sets `threads`. Default: `threads`, otherwise 1.",
    )
    memory: int | None = Field(
        default=None,
        gt=0,
        description="Bytes of main memory to reserve. Default: none are reserved.",
    )
    resources: dict[str, float] = Field(
        default_factory=dict,
        description="Custom resources, by name as in `ray start --resources`. They select a "
        "machine.",
    )
    placement_timeout: float = Field(
        default=60.0,
        gt=0,
        le=86_400,
        description="Maximum seconds to wait for a machine with these resources, and again for the "
        "actor to start there. The same limit applies after the member was lost.",
    )
    load_timeout: float = Field(
        default=1800.0, gt=0, le=86_400, description="Maximum seconds to load the member."
    )
    call_timeout: float = Field(
        default=300.0,
        gt=0,
        le=86_400,
        description="Maximum seconds to wait for the reply to one message, such as a forward pass.",
    )

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str | None) -> str | None:
        if address is not None:
            check_address(address)
        return address

    @field_validator("num_gpus")
    @classmethod
    def _check_gpus(cls, gpus: float | None) -> float | None:
        if gpus is not None and gpus > 1 and not gpus.is_integer():
            raise ValueError("above 1, it must be a whole number")
        return gpus

    @field_validator("resources")
    @classmethod
    def _check_resources(cls, resources: dict[str, float]) -> dict[str, float]:
        if reserved := {"CPU", "GPU", "memory", "object_store_memory"} & resources.keys():
            raise ValueError(
                f"it cannot contain {min(reserved)}; pass num_cpus, num_gpus or memory instead"
            )
        if any(amount <= 0 for amount in resources.values()):
            raise ValueError("every amount must be above 0")
        return resources

    def bundle(self, threads: int | None, *, has_gpus: bool) -> dict[str, float]:
        """Return the resources as Ray names them.

        Args:
            threads: number of CPU threads of the member, or None.
            has_gpus: whether the cluster has GPUs.
        """
        cpus = self.num_cpus if self.num_cpus is not None else float(threads or 1)
        gpus = self.num_gpus if self.num_gpus is not None else float(has_gpus)
        amounts = {"CPU": cpus, "GPU": gpus, "memory": self.memory or 0, **self.resources}
        bundle = {name: amount for name, amount in amounts.items() if amount}
        return bundle or {"CPU": LEAST_CPU}

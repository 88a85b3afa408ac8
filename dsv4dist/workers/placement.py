"""Where ranks go: the placement group, the order of ranks in it, and refusals that name the next command."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from dsv4dist.errors import PlacementError

log = logging.getLogger(__name__)

IMPOSSIBLE_WAIT_S = 8.0
"""How long to wait for nodes that may still join when the cluster is too small as a whole."""
_POLL_S = 0.25


@dataclass(frozen=True)
class Node:
    """What a node of the cluster has in total."""

    node_id: str
    hostname: str
    address: str
    cpus: float
    gpus: float

    def capacity(self, resource: str) -> int:
        """How many ranks it can hold, each with one CPU or one GPU."""
        return int(self.gpus if resource == "GPU" else self.cpus)


@dataclass(frozen=True)
class Placement:
    """A granted placement group of one bundle per rank."""

    group: PlacementGroup
    strategy: str
    resource: str
    node_ids: tuple[str, ...]
    """The node of each bundle."""

    @property
    def size(self) -> int:
        return len(self.node_ids)

    def is_whole(self) -> bool:
        """Whether every bundle is still where it was granted."""
        alive = {node.node_id for node in cluster_nodes()}
        return alive.issuperset(self.node_ids) and _bundle_nodes(self.group) == self.node_ids

    def remove(self) -> None:
        """Give the resources back."""
        remove_placement_group(self.group)


def cluster_nodes() -> list[Node]:
    """The nodes that are alive."""
    return [
        Node(
            node_id=node["NodeID"],
            hostname=node["NodeManagerHostname"],
            address=node["NodeManagerAddress"],
            cpus=node["Resources"].get("CPU", 0.0),
            gpus=node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def choose_strategy(nodes: Sequence[Node], size: int, resource: str) -> str | None:
    """STRICT_PACK when one node can hold all ranks, else PACK, else None: the cluster is too small."""
    capacities = [node.capacity(resource) for node in nodes]
    if max(capacities, default=0) >= size:
        return "STRICT_PACK"
    return "PACK" if sum(capacities) >= size else None


def place(size: int, resource: str, timeout_s: float, *, impossible_wait_s: float = IMPOSSIBLE_WAIT_S) -> Placement:
    """Reserve one CPU or one GPU (`resource`) for each of `size` ranks, on one node if any is large enough.

    A cluster that is too small as a whole is refused after `impossible_wait_s`, unless nodes are on their way.
    Raises: PlacementError saying what was asked, what each node has, and which command to run.
    """
    strategy = choose_strategy(cluster_nodes(), size, resource)
    if strategy is None and not impossible_wait_s:
        raise PlacementError(_refusal(size, resource, None, "the private Ray instance is too small"))
    group = placement_group([{resource: 1}] * size, strategy=strategy or "PACK")
    try:
        if strategy is None:
            strategy = _wait_for_nodes(size, resource, timeout_s, min(impossible_wait_s, timeout_s))
            if strategy == "STRICT_PACK":  # the nodes that came can do better than what is pending
                remove_placement_group(group)
                group = placement_group([{resource: 1}] * size, strategy=strategy)
        if not group.wait(timeout_s):
            raise PlacementError(_refusal(size, resource, strategy, f"not granted within {timeout_s:g} s"))
    except BaseException:
        remove_placement_group(group)
        raise
    node_ids = _bundle_nodes(group)
    log.info("placement: %d x 1 %s, %s on %d node(s)", size, resource, strategy, len(set(node_ids)))
    return Placement(group, strategy, resource, node_ids)


def rank_order(bundles: Sequence[tuple[str, str]], driver_node_id: str) -> list[int]:
    """The bundles in rank order, given each one's (node id, GPU id): by node, then by GPU.

    The driver's node comes first, so that rank 0, which sends results, is near; numbers sort as numbers.
    """

    def key(bundle: int) -> tuple[bool, str, int, str, int]:
        node_id, gpu_id = bundles[bundle]
        return (node_id != driver_node_id, node_id, int(gpu_id) if gpu_id.isdigit() else 0, gpu_id, bundle)

    return sorted(range(len(bundles)), key=key)


def _bundle_nodes(group: PlacementGroup) -> tuple[str, ...]:
    """The node id of each bundle, empty for one that has none."""
    by_bundle = placement_group_table(group)["bundles_to_node_id"]
    return tuple(by_bundle[bundle] or "" for bundle in sorted(by_bundle))


def _wait_for_nodes(size: int, resource: str, timeout_s: float, impossible_wait_s: float) -> str:
    started = time.monotonic()
    coming = False
    while True:
        strategy = choose_strategy(cluster_nodes(), size, resource)
        if strategy is not None:
            return strategy
        waited = time.monotonic() - started
        coming = coming or _nodes_are_coming()
        if waited > (timeout_s if coming else impossible_wait_s):
            raise PlacementError(_refusal(size, resource, None, "the cluster is too small"))
        time.sleep(_POLL_S)


def _refusal(size: int, resource: str, strategy: str | None, why: str) -> str:
    nodes, free = cluster_nodes(), _free(resource)
    has = "; ".join(
        f"{node.hostname} ({node.address}) {node.capacity(resource)}, {free.get(node.node_id, '?')} free"
        for node in nodes
    )
    spread = {None: "", "STRICT_PACK": " on one node", "PACK": " on as few nodes as possible"}[strategy]
    hint = ""
    if resource == "GPU" and not any(node.gpus for node in nodes):
        hint = " (Ray finds AMD GPUs through the Python package amdsmi; --device cpu needs none)"
    ranks, smaller = f"{size} ranks with", "use a smaller --tensor-parallel-size, or "
    if size == 1:
        ranks, smaller = "1 rank with", ""
    return (
        f"placement of {ranks} 1 {resource} each{spread}: {why}; nodes have {resource}: {has or 'none'}"
        f"{hint}; {smaller}see `ray status`"
    )


def _free(resource: str) -> dict[str, int]:
    """What is not in use now, by node id. Ray has no public call for it that works without its dashboard."""
    try:
        from ray._private.state import available_resources_per_node
    except ImportError:
        return {}
    return {node_id: int(free.get(resource, 0)) for node_id, free in available_resources_per_node().items()}


def _nodes_are_coming() -> bool:
    """Whether an autoscaler has begun to start nodes. Ray has no public call for it; without an answer: no."""
    for ask in (_pending_of_autoscaler_v2, _pending_of_autoscaler_v1):
        try:
            if ask():
                return True
        except (ImportError, AttributeError, RuntimeError, ValueError, TypeError, LookupError, OSError) as error:
            log.debug("%s: %s", ask.__name__, error)
    return False


def _pending_of_autoscaler_v2() -> bool:
    from ray.autoscaler.v2.sdk import get_cluster_status

    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    return bool(status.pending_launches or status.pending_nodes)


def _pending_of_autoscaler_v1() -> bool:
    from ray.experimental.internal_kv import _internal_kv_get

    read: Callable[[str], bytes | None] = _internal_kv_get
    report = json.loads(read("__autoscaling_status") or b"{}").get("autoscaler_report", {})
    return bool(report.get("pending_launches") or report.get("pending_nodes"))

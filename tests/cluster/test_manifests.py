"""What the files of cluster/ must say, whatever else they say."""

from __future__ import annotations

import ast
import copy
import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsv4dist.engine.metrics import COUNTERS, GAUGES, PREFIX

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
GPU = "amd.com/gpu"
KINDS = {"mi300x": "74a1", "mi355x": "75a3", "cpu": None}
"""The PCI id of the GPUs of each kind of node."""


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((CLUSTER / f"{name}.yaml").read_text())


def pods(cluster: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Of the head and of every worker group: the group, and its pods' specification."""
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield group, group["template"]["spec"]


@pytest.mark.parametrize("kind", KINDS)
def test_cluster(kind: str) -> None:
    resource = manifest(f"raycluster-{kind}")
    assert (resource["apiVersion"], resource["kind"]) == ("ray.io/v1", "RayCluster")
    spec = resource["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["rayVersion"] == ray_version("Dockerfile.cpu") == ray_version("Dockerfile.rocm")
    # No rank on the head, and its job server within reach of port forwarding only.
    wanted = {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "127.0.0.1"}
    assert spec["headGroupSpec"]["rayStartParams"].items() >= wanted.items()
    for group, pod in pods(spec):
        start = group["rayStartParams"]
        assert all(isinstance(value, str) for value in start.values()), "KubeRay takes strings only"
        assert pod["automountServiceAccountToken"] is False
        (container,) = pod["containers"]
        assert container["image"] == ("dsv4dist:cpu" if kind == "cpu" else "dsv4dist:rocm")
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        assert not any("hostPath" in volume for volume in pod["volumes"])
        # Shared memory large enough for the object store, and counted in the pod's memory.
        shm = {volume["name"]: volume for volume in pod["volumes"]}["shm"]["emptyDir"]
        assert shm["medium"] == "Memory"
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        resources = container["resources"]
        assert size(start["object-store-memory"]) < size(shm["sizeLimit"]) < size(resources["limits"]["memory"])
        # The driver reads the model's configuration, the ranks its weights, at the same path.
        assert any(mount["mountPath"] == "/models" for mount in container["volumeMounts"])
        gpus = int(start.get("num-gpus", -1))
        assert resources["limits"].get(GPU, 0) == resources["requests"].get(GPU, 0) == gpus
    for group in spec["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        if KINDS[kind] is None:
            assert pod["containers"][0]["securityContext"]["runAsNonRoot"] is True
        else:
            assert group["rayStartParams"]["num-gpus"] == "8"
            assert pod["nodeSelector"] == {"amd.com/gpu.device-id": KINDS[kind]}


@pytest.mark.parametrize("kind", KINDS)
def test_job(kind: str) -> None:
    resource = manifest(f"rayjob-{kind}")
    assert (resource["apiVersion"], resource["kind"]) == ("ray.io/v1", "RayJob")
    spec = resource["spec"]
    assert spec["backoffLimit"] == 0
    assert spec["submitterConfig"] == {"backoffLimit": 0}
    assert spec["shutdownAfterJobFinishes"] is True
    assert not {"entrypointNumGpus", "entrypointNumCpus", "entrypointResources"} & spec.keys()
    # The cluster is the standing one, but for the job server, which KubeRay must reach.
    cluster = copy.deepcopy(manifest(f"raycluster-{kind}")["spec"])
    del cluster["headGroupSpec"]["rayStartParams"]["dashboard-host"]
    assert spec["rayClusterSpec"] == cluster
    # As many ranks as one worker holds, and options that exist.
    words = spec["entrypoint"].split()
    start = cluster["workerGroupSpecs"][0]["rayStartParams"]
    ranks = start["num-cpus"] if KINDS[kind] is None else start["num-gpus"]
    assert words[:2] == ["dsv4dist", "generate"]
    assert words[words.index("--tp") + 1] == ranks
    help_text = generate_help()
    assert all(word in help_text for word in words if word.startswith("--"))


def test_machines_reached_by_ssh() -> None:
    config = manifest("ray-up")
    assert config["provider"]["type"] == "local"
    head, worker = config["head_start_ray_commands"], config["worker_start_ray_commands"]
    assert head[0] == worker[0] == "ray stop"
    for command in (head[1], worker[1]):
        assert "RAY_AUTH_MODE=token ray start" in command
        assert "--num-gpus=8" in command
    assert f"--node-ip-address={config['provider']['head_ip']}" in head[1]
    assert "--dashboard-host=127.0.0.1" in head[1]
    assert {"--device=/dev/kfd", "--device=/dev/dri", "--shm-size=16g"} <= set(config["docker"]["run_options"])
    assert "/root/.ray/auth_token" in config["file_mounts"]


def test_slurm_script() -> None:
    text = (CLUSTER / "slurm.sbatch").read_text()
    subprocess.run(["bash", "-n", CLUSTER / "slurm.sbatch"], check=True)
    assert "--dashboard-host=127.0.0.1" in text
    assert "trap stop_all EXIT" in text
    # Without arguments it says what is missing, before it touches anything.
    ran = subprocess.run(["bash", CLUSTER / "slurm.sbatch"], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)


def test_images_leave_torch_alone() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert not any(one.startswith("triton") for one in dependencies)
    subprocess.run(["sh", "-n", CLUSTER / "install.sh"], check=True)
    assert "--no-deps ." in (CLUSTER / "install.sh").read_text()
    for name in ("Dockerfile.rocm", "Dockerfile.cpu"):
        text = (CLUSTER / name).read_text()
        for source in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
            assert all((ROOT / one).exists() for one in source.split())
        assert f"docker build -f cluster/{name}" in text
    assert "amdsmi" in (CLUSTER / "Dockerfile.rocm").read_text()


def test_dashboard_shows_what_is_exported() -> None:
    dashboard = json.loads((CLUSTER / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    shown = set(re.findall(rf"\bray_{PREFIX}\w+", " ".join(expressions)))
    # Ray puts ray_ in front of every name, and its exporter _total behind a counter's.
    exported = {f"ray_{PREFIX}{name}" for name in GAUGES}
    exported |= {f"ray_{PREFIX}{name}_total" for name in COUNTERS}
    exported |= {f"ray_{PREFIX}step_seconds_{part}" for part in ("bucket", "sum", "count")}
    assert shown == exported
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_messages_in_the_operations_page_exist() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    table = page.partition("## What messages mean")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| ", table, re.MULTILINE)
    quoted = [text for row in rows for text in re.findall(r"`(.*?)`", row)]
    assert len(quoted) > 20
    texts = [
        node.value
        for path in (ROOT / "dsv4dist").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    # What stands between values, which the page shows as dots, numbers, capitals or in quotes.
    values = r"\.\.\.|\d+(?: s\b)?|'[^']*'|\b[A-Z:_]+\b|[:;()]"
    parts = [part.strip() for text in quoted for part in re.split(values, text)]
    unknown = [part for part in parts if len(part) > 8 and not any(part in text for text in texts)]
    assert not unknown


def ray_version(dockerfile: str) -> str:
    found = re.search(r"^ARG RAY_VERSION=(\S+)$", (CLUSTER / dockerfile).read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def generate_help() -> str:
    from typer.main import get_command

    from dsv4dist.cli.app import app

    command = get_command(app).commands["generate"]  # type: ignore[attr-defined]
    return " ".join(option for parameter in command.params for option in parameter.opts)


def size(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)([KMG]i)?", text).groups()  # type: ignore[union-attr]
    return int(number) * {None: 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}[unit]

"""`ray job submit` against a head of our own: results, exit codes, a stop in the middle, nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.dashboard.optional_deps", reason="the job server needs ray[default]")

ROOT = Path(__file__).parents[2]
LIMIT_S = 180.0  # deadlines for the test, not claims about speed
RAY = [sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.argv[0] = 'ray'; main()"]


class Head:
    """A Ray head with a job server, on loopback alone; every process that descends from it carries a mark."""

    def __init__(self, directory: Path) -> None:
        gcs, self.port, *others = _free_ports(5)
        self.directory = directory
        self._mark = f"DSV4_TEST_MARK={uuid.uuid4()}"
        self.token = uuid.uuid4().hex
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            # Else Ray replaces the loopback address below by the machine's and listens on every interface.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            # Idle workers would lack the jobs' working directory anyway.
            "RAY_enable_worker_prestart": "false",
            # Jobs start `python`: the one that has the dependencies.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        name, _, value = self._mark.partition("=")
        names = ("dashboard-agent-listen-port", "ray-client-server-port", "metrics-export-port")
        arguments = [f"--{name}={port}" for name, port in zip(names, others, strict=True)]
        arguments += ["--node-ip-address=127.0.0.1", f"--port={gcs}", f"--temp-dir={directory}"]
        arguments += ["--dashboard-host=127.0.0.1", f"--dashboard-port={self.port}", "--include-log-monitor=false"]
        arguments += ["--num-cpus=3", "--num-gpus=0", "--object-store-memory=100000000"]
        with (directory / "head.log").open("w") as log:
            self._process = subprocess.Popen(
                [*RAY, "start", "--head", "--block", *arguments],
                stdout=log,
                stderr=log,
                env={**self.environment, name: value},
                start_new_session=True,
            )
        wait_for(self._answers, lambda: f"{self._process.poll()}: {(directory / 'head.log').read_text()}")

    def ray(self, command: str, *arguments: str | Path) -> tuple[int, str]:
        """`ray job COMMAND`, as a user types it; its exit code, and what it printed."""
        environment = {**self.environment, "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{self.port}"}
        ran = subprocess.run(
            [*RAY, "job", command, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            timeout=LIMIT_S,
        )
        return ran.returncode, ran.stdout

    def status(self, submission_id: str) -> dict[str, Any]:
        """The job's record in the server's JSON."""
        return json.loads(self.get(f"/api/jobs/{submission_id}", self.token))

    def get(self, path: str, token: str) -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=_bearer(token))
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
            return answer.read()

    def processes(self, name: str = "") -> list[int]:
        """Processes that descend from the head and have `name` in their command line."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if (
                    entry.name.isdigit()
                    and self._mark.encode() in (entry / "environ").read_bytes().split(b"\0")
                    and name.encode() in (entry / "cmdline").read_bytes()
                ):
                    found.append(int(entry.name))
            except OSError:  # ended meanwhile
                continue
        return found

    def uploads(self) -> list[Path]:
        """The working directories that jobs were given."""
        return [p for p in self.directory.glob("session_2*/runtime_resources/working_dir_files/*") if p.is_dir()]

    def stop(self) -> None:
        """End Ray in order, and for certain."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(40)
            deadline = time.monotonic() + 10
            while self.processes() and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            for pid in self.processes():
                os.kill(pid, signal.SIGKILL)
            self._process.wait()

    def _answers(self) -> bool:
        assert self._process.poll() is None, (self.directory / "head.log").read_text()
        try:
            self.get("/api/jobs/", self.token)
        except (urllib.error.URLError, OSError):
            return False
        return True


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    directory = Path(tempfile.mkdtemp(prefix="dsv4-", dir="/tmp"))  # short: Unix sockets lie below it
    started = Head(directory)
    try:
        yield started
    finally:
        started.stop()
        shutil.rmtree(directory, ignore_errors=True)
    assert not started.processes()


@pytest.fixture(scope="module")
def working_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout as `--working-dir` takes it, with what must not travel; `imported` tells who imports it from where."""
    directory = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "dsv4dist", directory / "dsv4dist", ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".rayignore", ".gitignore", "pyproject.toml"):
        shutil.copy(ROOT / name, directory)
    for name in (".git", ".venv", "build", "tests", "docs"):
        (directory / name).mkdir()
        (directory / name / "content").write_text("x")
    with (directory / "dsv4dist" / "workers" / "actor.py").open("a") as source:
        source.write(f"\nwith open({str(directory / 'build' / 'imported')!r}, 'a') as _file:\n")
        source.write("    print(__file__, file=_file)\n")
    requests: list[dict[str, object]] = [{"id": "short", "prompt": "a", "max_tokens": 1}]
    requests += [{"id": f"long-{i}", "prompt": "a", "max_tokens": 3000, "ignore_eos": True} for i in range(50)]
    (directory / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in requests))
    return directory


@pytest.mark.ray
def test_results_and_exit_codes(
    head: Head, working_dir: Path, checkpoint: Callable[..., Path], engine: Callable[..., Any], tmp_path: Path
) -> None:
    model, nowhere, output = checkpoint("tiny-swa"), tmp_path / "nowhere", tmp_path / "out.jsonl"
    generate = ["--working-dir", working_dir, "--", "python", "-m", "dsv4dist", "generate", "--device", "cpu"]
    good = ["--model", model, "--prompt", "Hello", "--prompt-ids", "1,2,3", "--max-tokens", "5", "--output", output]
    bad = ["--model", nowhere, "--prompt", "a"]
    with ThreadPoolExecutor() as at_once:
        failing = at_once.submit(head.ray, "submit", "--submission-id", "bad", *generate, *bad)
        code, text = head.ray("submit", "--submission-id", "good", *generate, *good)
    assert code == 0, text
    assert f"dsv4dist: 2 done, 0 failed; results in {output}" in text.splitlines()
    status = head.status("good")
    assert (status["status"], status["driver_exit_code"]) == ("SUCCEEDED", 0)
    code, text = failing.result()
    assert code == 1
    assert f"dsv4dist: error: {nowhere}: no such directory" in text
    status = head.status("bad")
    assert (status["status"], status["driver_exit_code"]) == ("FAILED", 1)

    from dsv4dist import SamplingParams

    expected = engine(model).generate(["Hello", [1, 2, 3]], SamplingParams(max_tokens=5))
    found = {row["id"]: row["token_ids"] for row in map(json.loads, output.read_text().splitlines())}
    assert found == {"0": expected[0].token_ids, "1": expected[1].token_ids}
    # Driver and rank used the code that was uploaded, and no more was than they need.
    (upload,) = head.uploads()
    imported = (working_dir / "build" / "imported").read_text().splitlines()
    assert imported == [str(upload / "dsv4dist" / "workers" / "actor.py")] * 2
    travelled = {path.name for path in upload.iterdir()} - {".gitignore", ".rayignore"}
    assert travelled == {"dsv4dist", "in.jsonl", "pyproject.toml"}


@pytest.mark.ray
def test_stop_keeps_what_is_finished(
    head: Head, working_dir: Path, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    command = ["dsv4dist", "generate", "--device", "cpu", "--model", checkpoint("tiny-swa"), "--tp", "2"]
    # The driver looks for its input in the working directory.
    command += ["--input", "in.jsonl", "--output", output]
    arguments = ["--no-wait", "--submission-id", "long", "--working-dir", working_dir, "--", "python", "-m"]
    code, text = head.ray("submit", *arguments, *command)
    assert code == 0, text
    wait_for(lambda: output.exists() and output.stat().st_size > 0, lambda: head.ray("logs", "long")[1])
    assert head.processes("ray::Worker")
    code, text = head.ray("stop", "long")
    assert code == 0, text
    assert head.status("long")["status"] == "STOPPED"
    assert [json.loads(line)["id"] for line in output.read_text().splitlines()] == ["short"]
    assert "dsv4dist: interrupted by SIGTERM; results up to here are kept" in head.ray("logs", "long")[1]
    wait_for(lambda: not head.processes("ray::Worker") and not head.processes("dsv4dist"), lambda: "ranks are left")


@pytest.mark.ray
def test_strangers_are_refused(head: Head) -> None:
    with pytest.raises(urllib.error.HTTPError, match=r"401|403"):
        head.get("/api/jobs/", token="")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def wait_for(condition: Callable[[], bool], explain: Callable[[], str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.1)

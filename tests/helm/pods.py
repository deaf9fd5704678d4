"""Rendered pods as processes of this machine: command, environment, files, probes and hooks as the manifest has them.

What a node would bring is brought otherwise: a pod's address is one of 127.0.0.0/8, a service's name is the address of
its one pod, /app (the image's folder) is this repository or another tree of it, and a volume is a temporary folder.
Run by root, a pod sees the file system as its container would: what it may write to is its volumes, and nothing else.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.local.redis_server import _program as redis_program
from tests.helm.chart import NAMESPACE, Object, of_kind

ROOT = Path(__file__).parents[2]
ANY_ADDRESS = ("0.0.0.0", "::")
# A container's root, for the program behind `--`: folders before it stay as they are.
READ_ONLY_ROOT = """
mount --make-rprivate /
while [ "$1" != -- ]; do mount --bind "$1" "$1"; shift; done
shift
mount -o remount,bind,ro /
exec "$@"
"""


def has_own_root() -> bool:
    """True where a process here can be given a file system of its own."""
    return os.geteuid() == 0 and bool(shutil.which("unshare"))


@cache
def compile_kernels(code: Path) -> None:
    """Those of the image: pods have none of their own, and cannot write where these are."""
    subprocess.run([sys.executable, "-m", "tandem.precompile"], cwd=code, check=True, capture_output=True, timeout=300)


@dataclass
class Node:
    """A node that pods run on. `stop` ends what is left of them."""

    folder: Path
    objects: list[Object]
    subnet: int
    code: Path = ROOT  # of pods that are started from now on
    pods: dict[str, Pod] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def start(self, workload: Object, name: str | None = None) -> Pod:
        """A pod of a Deployment, StatefulSet or Pod."""
        number = next(self._numbers)
        template = workload if workload["kind"] == "Pod" else workload["spec"]["template"]
        name = name or f"{workload['metadata']['name']}-{number}"
        pod = Pod(self, name, f"127.{self.subnet}.0.{number + 1}", template, self.code)
        self.pods[name] = pod
        pod.start()
        return pod

    def start_release(self) -> None:
        """All of it, Redis first; returns when all is ready."""
        self.start(of_kind(self.objects, "StatefulSet")[0], "rel-redis-0").wait_ready()
        for pod in [self.start(workload) for workload in of_kind(self.objects, "Deployment")]:
            pod.wait_ready()

    def use(self, objects: list[Object]) -> None:
        """Applies an upgrade's objects; what was made up by the install is kept, as `lookup` does in a cluster."""
        kept = {o["metadata"]["name"]: o for o in of_kind(self.objects, "Secret")}
        self.objects = [kept.get(o["metadata"]["name"], o) if o["kind"] == "Secret" else o for o in objects]

    def find(self, kind: str, name: str) -> Object:
        return next(o for o in self.objects if o["kind"] == kind and o["metadata"]["name"] == name)

    def data(self, kind: str, name: str) -> dict[str, str]:
        found = self.find(kind, name)
        return {**found.get("data", {}), **found.get("stringData", {})}

    def resolve(self, text: str) -> str:
        """Names of services as addresses."""
        for service in of_kind(self.objects, "Service"):
            name, selector = service["metadata"]["name"], service["spec"]["selector"]
            for pod in list(self.pods.values()):
                if selector.items() <= pod.labels.items():
                    text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", pod.ip, text)
        return text

    def stop(self) -> None:
        for pod in list(self.pods.values()):
            pod.kill()


@dataclass
class Pod:
    node: Node
    name: str
    ip: str
    template: Object
    code: Path
    process: subprocess.Popen[bytes] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)  # of its container, from its start on

    @property
    def labels(self) -> dict[str, str]:
        return self.template["metadata"]["labels"]

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def container(self) -> Object:
        return self.template["spec"]["containers"][0]

    @property
    def grace_s(self) -> float:
        return float(self.template["spec"].get("terminationGracePeriodSeconds", 30))

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8")

    @property
    def folder(self) -> Path:
        return self.node.folder / self.name

    # --- life ---

    def start(self) -> None:
        if self.component in ("prefill", "decode"):
            compile_kernels(self.code)
        self.folder.mkdir()
        self._mount()
        for init in self.template["spec"].get("initContainers", ()):
            done = self.run(self._words(init), 200, init)
            assert done.returncode == 0, done.stderr
        self.environment = self._environment(self.container)
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                self._command(self._words(self.container), self.container),
                env=self.environment, cwd=self.code, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def wait_ready(self) -> None:
        """As the kubelet finds it: the startup probe within its bound, then the readiness probe."""
        startup = self.container["startupProbe"]
        self._wait_for("startupProbe", startup["periodSeconds"] * startup["failureThreshold"])
        assert self.probe("livenessProbe")
        self._wait_for("readinessProbe", 200)

    def probe(self, kind: str) -> bool:
        probe = self.container[kind]
        if "grpc" in probe:
            return self._grpc(probe["grpc"]["port"], probe["grpc"].get("service", ""), probe.get("timeoutSeconds", 1))
        return self._connects(self._port(probe["tcpSocket"]["port"]))

    def run(
        self, command: list[str], timeout: float, container: Object | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Beside the container's own process, with its environment."""
        return subprocess.run(
            self._command(command, container or self.container),
            env=self._environment(container) if container else self.environment,
            cwd=self.code, timeout=timeout, check=False, capture_output=True, encoding="utf-8",
        )  # fmt: skip

    def terminate(self) -> tuple[float, float]:
        """preStop, SIGTERM, the end; seconds of the hook and of the rest. Fails where the kubelet would kill."""
        assert self.process is not None
        began = time.monotonic()
        if hook := self.container.get("lifecycle", {}).get("preStop"):
            done = self.run(hook["exec"]["command"], self.grace_s)
            assert done.returncode == 0, done.stdout + done.stderr
        hooked = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(max(1.0, self.grace_s - (hooked - began)))
        assert status == 0, self.log[-3000:]
        del self.node.pods[self.name]
        return hooked - began, time.monotonic() - hooked

    def is_of(self, workload: Object) -> bool:
        return bool(workload["spec"]["selector"]["matchLabels"].items() <= self.labels.items())

    def wait(self, timeout: float) -> int:
        """Exit status of a pod that ends by itself."""
        assert self.process is not None
        return self.process.wait(timeout)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)

    # --- what the manifest says ---

    def _wait_for(self, kind: str, seconds: float) -> None:
        assert self.process is not None
        end = time.monotonic() + seconds
        while not self.probe(kind):
            assert self.process.poll() is None, f"{self.name} ended:\n{self.log[-3000:]}"
            assert time.monotonic() < end, f"{self.name}: no {kind} in {seconds} s:\n{self.log[-3000:]}"
            time.sleep(0.1)

    def _mounts(self) -> dict[str, Path]:
        return {mount["mountPath"]: self._place(mount) for mount in self.container["volumeMounts"]}

    def _place(self, mount: Object) -> Path:
        nodes = {v["name"]: Path(v["hostPath"]["path"]) for v in self.template["spec"]["volumes"] if "hostPath" in v}
        return nodes.get(mount["name"], self.folder / mount["name"])

    def _mount(self) -> None:
        for volume in self.template["spec"]["volumes"]:
            folder = self.folder / volume["name"]
            folder.mkdir()
            if "configMap" in volume:
                self._write(folder, self.node.data("ConfigMap", volume["configMap"]["name"]))
            elif "secret" in volume:
                data, items = self.node.data("Secret", volume["secret"]["secretName"]), volume["secret"].get("items")
                self._write(folder, {item["path"]: data[item["key"]] for item in items} if items else data)
        for claim in self._claims():
            (self.folder / claim).mkdir(exist_ok=True)

    def _claims(self) -> list[str]:
        volumes = {volume["name"] for volume in self.template["spec"]["volumes"]}
        return [m["name"] for m in self.container["volumeMounts"] if m["name"] not in volumes]

    def _write(self, folder: Path, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            text = re.sub(r"(?m)^bind .*$", f"bind {self.ip}", text)
            (folder / name).write_text(self._placed(text), encoding="utf-8")

    def _placed(self, text: str) -> str:
        """Paths of the container as paths here."""
        places = {"/app": self.code, **self._mounts()}
        known = "|".join(sorted(map(re.escape, places), key=len, reverse=True))
        return re.sub(rf"(?<![\w/])({known})(?=/|\s|$)", lambda found: str(places[found[1]]), text)

    def _words(self, container: Object) -> list[str]:
        """After the image's own entry point, which only passes signals on."""
        return [*container.get("command", ()), *container.get("args", ())]

    def _command(self, words: list[str], container: Object) -> list[str]:
        programs = {"python": sys.executable, "redis-server": str(redis_program())}
        command = [programs.get(words[0], words[0]), *(self._placed(word) for word in words[1:])]
        if not has_own_root():
            return command
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        written = [str(self._place(m)) for m in container["volumeMounts"] if not m.get("readOnly")]
        return ["unshare", "--mount", "--", "sh", "-ec", READ_ONLY_ROOT, "sh", *written, "--", *command]

    def _environment(self, container: Object) -> dict[str, str]:
        tmp = str(self.folder / "tmp")
        found = {"PATH": os.environ["PATH"], "HOME": tmp, "TMPDIR": tmp, "OMP_WAIT_POLICY": "PASSIVE"}
        if self.component in ("prefill", "decode"):  # as in their images: with the kernels that are in it
            found["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
        for source in container.get("envFrom", ()):
            found |= self.node.data("Secret", source["secretRef"]["name"])
        for variable in container.get("env", ()):
            text = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], self._value(variable))
            text = self.ip if text in ANY_ADDRESS else text
            found[variable["name"]] = self.node.resolve(self._placed(text))
        return found

    def _value(self, variable: Object) -> str:
        if "value" in variable:
            return str(variable["value"])
        source = variable["valueFrom"]
        if "secretKeyRef" in source:
            return self.node.data("Secret", source["secretKeyRef"]["name"])[source["secretKeyRef"]["key"]]
        path = source["fieldRef"]["fieldPath"]
        if label := re.fullmatch(r"metadata\.labels\['(.+)'\]", path):
            return self.labels.get(label[1], "")
        known = {"metadata.name": self.name, "metadata.namespace": NAMESPACE, "status.podIP": self.ip}
        return {**known, "spec.nodeName": "node"}[path]

    def _port(self, port: str | int) -> int:
        return port if isinstance(port, int) else next(
            p["containerPort"] for p in self.container["ports"] if p["name"] == port
        )  # fmt: skip

    def _grpc(self, port: int, service: str, timeout: float) -> bool:
        with grpc.insecure_channel(f"{self.ip}:{port}") as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service=service), timeout=timeout
                )
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _connects(self, port: int) -> bool:

        try:
            socket.create_connection((self.ip, port), timeout=1).close()
        except OSError:
            return False
        return True

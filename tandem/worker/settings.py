"""The settings that prefill and decode workers share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ByteSize, Field

from tandem.checkpoints import ModelPath
from tandem.engine import EngineConfig, StepTime
from tandem.service_settings import MetricsSettings, RequestSettings
from tandem.speculative import MAX_NUM_TOKENS, OFF, Speculative

AUTO = ("auto",)
HOST_TRANSPORTS = ("shm", "tcp")
DEVICE_TRANSPORTS = ("nccl", "cuda_ipc", *HOST_TRANSPORTS)
CPU_KV_MEMORY, DEVICE_SHARE = 256 * 2**20, 0.9
SWAP_MEMORY = 256 * 2**20  # bytes of the host for KV of preempted answers
LEASE_TTL_S = 2.0  # seconds of silence after which a worker counts as dead
# Of a device's memory, or bytes; a number below 1 is a share.
KVMemory = Annotated[Annotated[float, Field(gt=0, lt=1)] | ByteSize, Field(union_mode="left_to_right")]


# Settings that may change at run time. A worker's traces are sampled by its gateways.
FOLLOWED = frozenset({"log_level"})


class WorkerSettings(RequestSettings, MetricsSettings):
    """The settings of a worker."""

    model_path: ModelPath = Field(
        description="the model: a Hugging Face folder, a GGUF file, or hf://organisation/model"
    )
    model_name: str = Field("", description="name the model is served under (default: the folder's name)")
    worker_id: str = Field("", description="stable name of this worker (default: role, host and port)")
    transfer_port: int = Field(0, ge=0, le=65535, description="port of the KV listener; 0 takes a free one")
    node: str = Field("", description="the machine's name (default: its hostname): pairs of one machine are preferred")
    nvlink_domain: str = Field("", description="name of its NVLink domain: pairs of one are as near as on one machine")
    zone: str = Field("", description="name of its zone: pairs within one are preferred to others")
    ready_when: Literal["registered", "linked"] = Field(
        "registered", description="linked: only once KV bytes have moved between it and a worker of the other role"
    )
    transports: tuple[str, ...] = Field(
        AUTO, description="how KV may move, best first; auto: shm, tcp, and on GPUs before them nccl, cuda_ipc"
    )
    engine: Literal["model", "null"] = Field(
        "model", description="null: no weights, steps take a stated time, KV holds verified digests of the tokens"
    )
    null_step: StepTime = Field(StepTime(), description="how long the null engine's steps take: docs/null-engine.md")
    device: str = Field("cpu", description="cpu, cuda or cuda:N")
    cuda_graphs: bool = Field(False, description="replay decode steps as CUDA graphs (see docs/gpu.md)")
    dtype: str = Field("auto", description="float32, bfloat16, or auto: as the weights are stored")
    quantization: Literal["none", "int8", "int4", "fp8"] = Field(
        "none", description="what weights are made when loaded: 8 or 4 bits a number; fp8 on GPUs"
    )
    kv_cache_dtype: Literal["auto", "int8"] = Field(
        "auto", description="what KV is held and moved in; auto: what the model computes in"
    )
    kv_memory: KVMemory | None = Field(
        None,
        description="memory for the KV cache, such as 4GiB (default: 256MiB); on GPUs also what weights, steps and KV "
        "take together, as a share of the device (default: 0.9)",
    )
    num_blocks: int | None = Field(None, ge=2, description="size of the KV cache in blocks, instead of kv-memory")
    kv_host: ByteSize = Field(
        ByteSize(0), ge=0, description="host memory for KV blocks that leave a GPU's cache, such as 16GiB; 0: none"
    )
    kv_disk: ByteSize = Field(
        ByteSize(0), ge=0, description="disk for KV blocks that outlive memory and restarts, such as 20GiB; 0: none"
    )
    kv_disk_folder: Path = Field(
        Path("~/.cache/tandem/kv"), description="folder for them: prompts can be guessed from it, as from memory"
    )
    kv_tenant_share: float = Field(
        1.0, gt=0, le=1, description="the part of each of these that one tenant may fill, before its own blocks go"
    )
    kv_ttl_s: float = Field(
        0.0, ge=0, description="blocks in them that nobody has used for so many seconds go; 0: none for that"
    )
    block_size: int = Field(16, ge=1, le=256, description="tokens per KV block")
    max_num_batched_tokens: int | None = Field(
        None, ge=1, description="token budget of one engine step (default: 512; on GPUs 8192 from 70 GiB on, else 2048)"
    )
    max_num_seqs: int | None = Field(
        None,
        ge=1,
        description="sequences run at once (most: max-num-batched-tokens, or the KV blocks, which are the default on "
        "CPUs; on GPUs 1024 from 70 GiB on, else 256)",
    )
    max_model_len: int | None = Field(None, ge=2, description="longest prompt plus answer (default: the model's)")
    speculative_method: Literal["none", "ngram", "draft", "medusa", "eagle", "eagle3"] = Field(
        "none", description="what proposes tokens ahead: what followed earlier in the text, a draft model, or heads"
    )
    speculative_num_tokens: int = Field(
        OFF.num_tokens, ge=0, le=MAX_NUM_TOKENS, description="most tokens proposed in a step"
    )
    speculative_model: ModelPath | None = Field(
        None, description="folder of a draft model with the same vocabulary, or of heads"
    )
    lora_dir: Path | None = Field(
        None,
        description="folder, the same for all workers, that LoRA adapters (PEFT) are loaded from",
    )
    lora_hub: bool = Field(
        False, description="adapters may be fetched from the Hugging Face Hub too, by organisation/adapter[@revision]"
    )
    lora_memory: ByteSize = Field(ByteSize(2**30), description="memory for adapters; others are read again when used")
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of the engine, of all its ranks together (default: torch's choice, at most the CPUs "
        "it may use)",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=8,
        description="ranks: processes that share each layer's weights and compute each step together; docs/parallel.md",
    )
    shared_cores: Path | None = Field(None, description="folder where one machine's workers lend out idle cores")
    crash_dir: Path = Field(
        Path("/tmp/tandem-crashes"),
        description="folder that outlives the process: there it says at any time whom it computes, for its next start",
    )
    max_step_s: float = Field(
        30.0,
        gt=0,
        description="a worker ends when one engine step takes longer, on a busy machine so many times as long; "
        "its requests go on elsewhere",
    )

    @property
    def registry_wait_s(self) -> float:
        """The bound of a Redis call: a lease outlives several lost calls."""
        return LEASE_TTL_S / 4

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def kv_transports(self) -> tuple[str, ...]:
        """Transports to use, best first."""
        if self.transports != AUTO:
            return self.transports
        return HOST_TRANSPORTS if self.on_cpu else DEVICE_TRANSPORTS

    @property
    def served_name(self) -> str:
        return self.model_name or self.model_path.resolve().name

    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            model_path=self.model_path,
            model_name=self.served_name,
            dtype=self.dtype,
            device=self.device,
            cuda_graphs=self.cuda_graphs,
            block_size=self.block_size,
            kv_budget_bytes=self._kv_budget_bytes(),
            memory_share=self.kv_memory if isinstance(self.kv_memory, float) else DEVICE_SHARE,
            num_blocks=self.num_blocks,
            swap_memory=SWAP_MEMORY,
            max_num_batched_tokens=self.max_num_batched_tokens or 0,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            speculative=Speculative(self.speculative_method, self.speculative_num_tokens),
            speculative_model=self.speculative_model,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            lora_dir=self.lora_dir,
            lora_hub=self.lora_hub,
            lora_memory=int(self.lora_memory),
            num_threads=self.threads,
            shared_cores=self.shared_cores,
            tensor_parallel=self.tensor_parallel,
            null=self.null_step if self.engine == "null" else None,
        )

    def _kv_budget_bytes(self) -> int | None:
        """The memory for KV in bytes; None: what the device has."""
        if self.kv_memory is None and (self.on_cpu or self.engine == "null"):
            return CPU_KV_MEMORY
        return None if self.kv_memory is None or isinstance(self.kv_memory, float) else int(self.kv_memory)

"""The settings that prefill and decode workers share."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field

from tandem.checkpoints import ModelPath
from tandem.engine import EngineConfig, StepTime
from tandem.security import ClusterSettings
from tandem.speculative import MAX_NUM_TOKENS, OFF, Speculative


class WorkerSettings(ClusterSettings):
    """A Tandem worker."""

    model_path: ModelPath = Field(
        description="the model: a Hugging Face folder, a GGUF file, or hf://organisation/model"
    )
    model_name: str = Field("", description="name the model is served under (default: the folder's name)")
    redis_url: str = Field("redis://127.0.0.1:6379", description="the registry")
    namespace: str = Field("tandem", min_length=1, description="prefix of the registry's keys: one per cluster")
    worker_id: str = Field("", description="stable name of this worker (default: role, host and port)")
    host: str = Field("127.0.0.1", description="address to listen on")
    advertise_host: str = Field("", description="address others reach this worker at (default: host)")
    grpc_port: int = Field(0, ge=0, le=65535, description="0 chooses a free one")
    transfer_port: int = Field(0, ge=0, le=65535, description="port of the KV listener; 0 chooses a free one")
    health_port: int | None = Field(
        None, ge=1, le=65535, description="port of plain gRPC health and draining, for probes; none if not set"
    )
    metrics_port: int | None = Field(
        None, ge=1, le=65535, description="port of Prometheus metrics, at /metrics; none if not set"
    )
    ready_when: Literal["registered", "linked"] = Field(
        "registered", description="linked: only once KV bytes have moved between it and a worker of the other role"
    )
    transports: tuple[str, ...] = Field(("shm", "tcp"), description="how KV may move, best first")
    engine: Literal["model", "null"] = Field(
        "model", description="null: no weights, steps take a stated time, KV holds verified digests of the tokens"
    )
    null_prefill_tokens_per_s: float = Field(StepTime.prefill_tokens_per_s, gt=0, description="null engine: reading")
    null_decode_step_s: float = Field(StepTime.decode_step_s, ge=0, description="null engine: a decode step")
    null_decode_sequence_s: float = Field(
        StepTime.decode_sequence_s, ge=0, description="null engine: what each decoding sequence adds to it"
    )
    null_speedup: float = Field(StepTime.speedup, gt=0, description="null engine: divides all its times")
    device: str = Field("cpu", description="cpu, cuda or cuda:N")
    cuda_graphs: bool = Field(False, description="replay decode steps as CUDA graphs (see docs/gpu.md)")
    dtype: str = Field("auto", description="float32, bfloat16, or auto: as the weights are stored")
    quantization: Literal["none", "int8", "int4", "fp8"] = Field(
        "none", description="what weights are made when loaded: 8 or 4 bits a number; fp8 on GPUs"
    )
    kv_cache_dtype: Literal["auto", "int8"] = Field(
        "auto", description="what KV is held and moved in; auto: what the model computes in"
    )
    kv_memory: ByteSize = Field(ByteSize(256 * 2**20), description="memory for the KV cache, such as 4GiB")
    num_blocks: int | None = Field(None, ge=2, description="size of the KV cache in blocks, instead of kv-memory")
    swap_memory: ByteSize = Field(
        ByteSize(256 * 2**20), ge=0, description="host memory for KV of preempted answers; 0: it is computed again"
    )
    block_size: int = Field(16, ge=1, le=256, description="tokens per KV block")
    max_num_batched_tokens: int = Field(512, ge=1, description="token budget of one engine step")
    max_prefill_beside_decode: int | None = Field(
        None, ge=1, description="prompt tokens in a step that also decodes (default: 0.1 s of them on CPUs)"
    )
    max_num_seqs: int | None = Field(
        None,
        ge=1,
        description="sequences run at once (default and most: max-num-batched-tokens, or the KV blocks)",
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
    jump_forward: bool = Field(
        True, description="compute tokens that a grammar leaves no choice about in one step; the answer is the same"
    )
    lora_dir: Path | None = Field(
        None,
        description="folder, the same for all workers, that LoRA adapters (PEFT) are loaded from",
    )
    lora_memory: ByteSize = Field(ByteSize(2**30), description="memory for adapters; others are read again when used")
    threads: int | None = Field(None, ge=1, description="CPU threads of the engine (default: torch's choice)")
    shared_cores: Path | None = Field(None, description="folder where one machine's workers lend out idle cores")
    crash_dir: Path = Field(
        Path("/tmp/tandem-crashes"),
        description="folder that outlives the process: there it says at any time whom it computes, for its next start",
    )
    lease_ttl_s: float = Field(2.0, gt=0.2, description="a worker silent for so long is taken for dead")
    max_step_s: float = Field(
        30.0, gt=0, description="a worker ends when one engine step takes longer; its requests go on elsewhere"
    )
    drain_s: float = Field(30.0, ge=0, description="on SIGTERM, time for running requests to end; then they move")
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$")

    @property
    def registry_wait_s(self) -> float:
        """How long a call of Redis may take: a lease outlives several that are lost."""
        return self.lease_ttl_s / 4

    @property
    def served_name(self) -> str:
        return self.model_name or self.model_path.resolve().name

    def reachable_host(self, hostname: str) -> str:
        """Host at which others reach it; `hostname` is the machine's."""
        return self.advertise_host or (hostname if self.host in ("0.0.0.0", "::") else self.host)

    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            model_path=self.model_path,
            model_name=self.served_name,
            dtype=self.dtype,
            device=self.device,
            cuda_graphs=self.cuda_graphs,
            block_size=self.block_size,
            kv_budget_bytes=int(self.kv_memory),
            num_blocks=self.num_blocks,
            swap_memory=int(self.swap_memory),
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_prefill_beside_decode=self.max_prefill_beside_decode,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            speculative=Speculative(self.speculative_method, self.speculative_num_tokens),
            speculative_model=self.speculative_model,
            jump_forward=self.jump_forward,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            lora_dir=self.lora_dir,
            lora_memory=int(self.lora_memory),
            num_threads=self.threads,
            shared_cores=self.shared_cores,
            null=self._step_time() if self.engine == "null" else None,
        )

    def _step_time(self) -> StepTime:
        return StepTime(
            prefill_tokens_per_s=self.null_prefill_tokens_per_s,
            decode_step_s=self.null_decode_step_s,
            decode_sequence_s=self.null_decode_sequence_s,
            speedup=self.null_speedup,
        )

"""The parts of an engine: models read and loaded, KV caches within one budget, and the runner of its steps.

config ── the model ──> layout, KV cache, Forward, Choose ──> Runner
       └─ the draft model, if any ──> the same, over as many blocks ──> DraftProposer
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import structlog
import torch
from torch import Tensor

from tandem.checkpoints import WEIGHTS_FILE, MemoryNeed, described, fetch_adapter
from tandem.engine.cores import Cores
from tandem.engine.device import memory_checked
from tandem.engine.fitting import DeviceRoom, check_memory, graphs_bytes, largest_steps
from tandem.engine.forward import (
    CudaCapture,
    DecodeGraphs,
    Forward,
    Shape,
    Taps,
    TorchForward,
    padded,
)
from tandem.engine.kernels import AMX, CpuChoose, CpuForward
from tandem.engine.kv import KVLayout, torch_dtype
from tandem.engine.loading import LEAST_WORK, Loaded, lead, load, new_kv_cache
from tandem.engine.lora import AdapterStore, Base
from tandem.engine.models import Decoder, ModelConfig, read_model_config
from tandem.engine.null_runner import NullRunner, null_layout
from tandem.engine.parallel import NO_RANKS, Ranks, StartRank, check_split
from tandem.engine.runner import Runner
from tandem.engine.sampling import Choose, choose
from tandem.engine.scheduling import WindowBlocks, Windows
from tandem.engine.speculation import (
    DraftProposer,
    NgramProposer,
    Proposer,
    head_proposer,
    read_head,
    tapped_layers,
)
from tandem.engine.types import EngineConfig, Progress
from tandem.engine.weights import find_weights, hashing, shard_paths
from tandem.machine import native

log = structlog.get_logger(__name__)
# Multiplications that a step may spend on prompt tokens beside decodes: about a tenth of a second for two cores that do
# 200 G bfloat16 multiplications a second, or 600 G with AMX. With fewer rows, reading the weights would dominate.
CPU_MULTIPLICATIONS, AMX_MULTIPLICATIONS, CPU_ROWS = 25 * 10**9, 50 * 10**9, 32
MOST_BLOCKS = 1 << 40
WORD = 8  # bytes: the unit in which a device copies blocks


class Parts(NamedTuple):
    """The parts of an engine: `runner` computes steps over `kv_cache`, whose bytes `layout` describes.

    `num_blocks`: of sequences; layers with a window have fewer, which `windows` gives to these. `proposers`
    maps each method to its proposer. `adapters` is None where the engine takes no adapters. `ranks`: those beside this
    process, which computes steps together with them.
    """

    model_config: ModelConfig
    layout: KVLayout
    kv_cache: list[Tensor]
    num_blocks: int
    windows: WindowBlocks | None
    runner: Runner | NullRunner
    proposers: Mapping[str, Proposer]
    adapters: AdapterStore | None = None
    ranks: Ranks = NO_RANKS


class Computing(NamedTuple):
    """The positional arguments of a Runner: a forward pass, its KV cache and the function that chooses tokens."""

    forward: Forward
    kv_cache: list[Tensor]
    choose: Choose


class Ports(NamedTuple):
    """Functions of the outside: `sleep` spends a null engine's time, `start_rank` starts a rank beside this one."""

    on_progress: Progress | None
    sleep: Callable[[float], None]
    start_rank: StartRank


def build(config: EngineConfig, cores: Cores, ports: Ports) -> Parts:
    """Builds an engine's parts. Raises ValueError naming the wrong field of the config or file of a checkpoint."""
    with memory_checked(torch.device(config.device)):
        return _build(config, cores, ports)


def _build(config: EngineConfig, cores: Cores, ports: Ports) -> Parts:
    model = read_model_config(config.model_path, config.max_model_len)
    if config.null:
        layout = null_layout(config)
        num_blocks = _blocks_told(config, layout) or _blocks_of(_room(config).left(), layout)
        kv_cache = new_kv_cache(layout, config.device, num_blocks)
        null, proposers = NullRunner(config.null, kv_cache, model.vocab_size, ports.sleep), {"ngram": NgramProposer()}
        return Parts(model, layout, kv_cache, num_blocks, None, null, proposers, _adapters(config, model, layout))
    if model.experts is not None and config.cuda_graphs:
        raise ValueError("cuda_graphs: which experts compute a step is known on the host, which graphs do not ask")
    if config.tensor_parallel > 1:
        check_split(model, config.tensor_parallel)
    if model.quantized is not None and config.quantization != "none":
        raise ValueError(f"quantization: {config.quantization}, but the checkpoint is quantized already")
    # Compare names and shapes first, so that a wrong config fails before memory is allocated for its sizes.
    find_weights(Decoder(model, torch.float32, "meta"), config.model_path)
    with hashing(config.model_path, [] if config.revision else shard_paths(config.model_path)) as hashed:
        parts = _read_parts(config, model, cores, ports)
        revision = _revision(config, model, hashed.result())
    return parts._replace(layout=dataclasses.replace(parts.layout, revision=revision))


def _revision(config: EngineConfig, model: ModelConfig, of_weights: str) -> str:
    """Returns the layout's revision, which differs wherever KV bytes would differ, so blocks get other names there."""
    quantization = "" if config.quantization == "none" else f"+{config.quantization}"
    kv_cache = "" if config.kv_cache_dtype == "auto" else f"+kv-{config.kv_cache_dtype}"
    # With longrope, max_model_len decides which factors rotate the keys, so these factors are part of the revision.
    factors = repr(model.rope.factors).encode() if model.rope.factors else b""
    rope = f"+rope-{blake2b(factors, digest_size=4).hexdigest()}" if factors else ""
    return (config.revision or of_weights) + quantization + kv_cache + rope


def _read_parts(config: EngineConfig, model: ModelConfig, cores: Cores, ports: Ports) -> Parts:
    """Loads the models and builds every part; the layout's revision stays empty."""
    layout = _layout(config, model)
    head = read_head(config.speculative_model) if config.speculative_model else None
    if head and (model.norms_from_one or model.logits_divisor or model.embed_scale):
        raise ValueError(f"speculative_model: heads of {model.model_type} models are not served")
    taps = Taps(tapped_layers(head, model.num_layers) if head else ())
    if taps.at and config.cuda_graphs:
        raise ValueError("cuda_graphs: eagle3 heads read what goes into layers, which graphs do not keep")
    draft = None if head else _read_draft(config, model)
    layouts = [layout, dataclasses.replace(_layout(config, draft), windows=None)] if draft else [layout]
    computing, drafting, num_blocks, ranks = _load_all(config, model, draft, layouts, cores, taps, ports)
    windows = WindowBlocks(layout.windows, num_blocks) if layout.windows else None
    proposers: dict[str, Proposer] = {"ngram": NgramProposer()}
    observer = None
    if head:
        place = torch.empty(0, dtype=torch_dtype(layout.dtype), device=config.device)
        observer = head_proposer(head, config.model_path, model, taps, computing.choose, place)
        proposers[head.method] = observer
    if draft and drafting:
        most = config.max_num_batched_tokens
        chunk = min(max_prefill_beside_decode(config, draft) or most, most)
        proposers["draft"] = DraftProposer(*drafting, chunk)
    runner = Runner(*computing, observer, overlaps=config.device != "cpu", windows=windows)
    adapters, kv_cache = _adapters(config, model, layout), computing.kv_cache
    return Parts(model, layout, kv_cache, num_blocks, windows, runner, proposers, adapters, ranks)


def _load_all(
    config: EngineConfig, model: ModelConfig, draft: ModelConfig | None, layouts: list[KVLayout], cores: Cores,
    taps: Taps, ports: Ports,
) -> tuple[Computing, Computing | None, int, Ranks]:  # fmt: skip
    """Loads the model, whole or among ranks, and its draft. Returns what computes both, the number of blocks, and the
    other ranks."""
    num_blocks, ranks = _blocks_told(config, *layouts), NO_RANKS
    if num_blocks:
        check_memory(config, _weights_bytes(config.model_path, model, layouts[0]), layouts[0], num_blocks)
    room = _room(config) if num_blocks is None else None
    loaded_draft = None
    if draft and config.speculative_model:
        loaded_draft = load(config, config.speculative_model, draft, layouts[1], ports.on_progress)
    if config.tensor_parallel > 1 and num_blocks:
        led = lead(config, model, layouts[0], num_blocks, ports.start_rank, taps, ports.on_progress)
        its_choose = choose if led.library is None else CpuChoose(led.library, cores.threads)
        computing, ranks = Computing(led.forward, led.kv_cache, its_choose), led.ranks
    else:
        loaded = load(config, config.model_path, model, layouts[0], ports.on_progress)
        num_blocks = num_blocks or _blocks_that_fit(config, room or _room(config), loaded, *layouts)
        kv_cache = new_kv_cache(layouts[0], config.device, num_blocks)
        computing = _computing(config, loaded, layouts[0], kv_cache, cores, taps)
    drafting = None
    if loaded_draft:
        its_cache = new_kv_cache(layouts[1], config.device, num_blocks)
        drafting = _computing(config, loaded_draft, layouts[1], its_cache, cores)
    return computing, drafting, num_blocks, ranks


def _adapters(config: EngineConfig, model: ModelConfig, layout: KVLayout) -> AdapterStore | None:
    if config.lora_dir is None and not config.lora_hub:
        return None
    if model.latent is not None:
        served = "are not served: merge them into its weights"
        raise ValueError(f"lora_dir: adapters of {model.model_type}, whose attention is latent, {served}")
    names = frozenset({config.model_name.lower(), config.model_path.resolve().name.lower()})
    place = torch.empty(0, dtype=torch_dtype(layout.dtype), device=config.device)
    fetch = fetch_adapter if config.lora_hub else None
    return AdapterStore(config.lora_dir, config.lora_memory, Base(model, names), place, fetch)


def max_prefill_beside_decode(config: EngineConfig, model: ModelConfig) -> int | None:
    """Returns the most prompt tokens of a step that also decodes; None leaves that to the measured speed (Pace)."""
    if config.max_prefill_beside_decode is not None or config.device != "cpu":
        return config.max_prefill_beside_decode
    if config.null:
        return config.max_num_batched_tokens
    most = AMX_MULTIPLICATIONS if native.cpu_instructions().issuperset(AMX) else CPU_MULTIPLICATIONS
    return max(CPU_ROWS, most // model.multiplications)


def _read_draft(config: EngineConfig, model: ModelConfig) -> ModelConfig | None:
    if config.speculative_model is None:
        return None
    try:
        draft = read_model_config(config.speculative_model, config.max_model_len or model.max_model_len)
    except ValueError as error:
        raise ValueError(f"speculative_model: {error}") from None
    if draft.vocab_size != model.vocab_size:
        raise ValueError(f"speculative_model: its vocabulary has {draft.vocab_size} tokens, not {model.vocab_size}")
    return draft


def _layout(config: EngineConfig, model: ModelConfig) -> KVLayout:
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    torch_dtype(dtype)
    if config.kv_cache_dtype == "int8" and model.head_dim % 2:
        raise ValueError(f"kv_cache_dtype: int8, but the model's heads have {model.head_dim} numbers, which is odd")
    layout = KVLayout(
        model=config.model_name,
        revision="",  # `_build` sets it once the weights are hashed
        dtype=dtype,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        kv_cache_dtype=config.kv_cache_dtype,
        windows=Windows.of(model.windows, config.block_size, model.max_model_len),
    )
    if layout.block_bytes % WORD:
        least = WORD // math.gcd(WORD, layout.block_bytes // layout.block_size)
        raise ValueError(
            f"block_size: {layout.block_size} tokens make blocks of {layout.block_bytes} bytes a layer, which devices "
            f"copy by {WORD} bytes: a multiple of {least} is needed"
        )
    return layout


def _blocks_told(config: EngineConfig, *layouts: KVLayout) -> int | None:
    """Returns the number of blocks that the config sets, directly or as a memory budget; None if it sets neither."""
    if config.num_blocks is not None or config.kv_budget_bytes is None:
        return config.num_blocks
    return _blocks_of(config.kv_budget_bytes, *layouts, name="kv_budget_bytes")


def _blocks_of(budget: int, *layouts: KVLayout, gathered: int = 0, name: str = "kv_memory") -> int:
    """Returns how many blocks of all layouts fit into `budget` bytes.

    `gathered`: layers' worth of scratch KV to reserve for each block besides. Raises ValueError, naming `name`, if not
    even one block fits.
    """

    def taken(num_blocks: int) -> int:
        scratch = num_blocks * gathered
        return sum(its.cache_bytes(num_blocks) + its.block_bytes * scratch for its in layouts)

    # Layers with a window have fewer blocks, so more fit than if all layers had as many.
    num_blocks = bisect_right(range(1, MOST_BLOCKS), budget, key=taken)
    if num_blocks < 1:
        raise ValueError(f"{name}: {budget} bytes do not hold one block")
    return num_blocks


def _room(config: EngineConfig) -> DeviceRoom:
    return DeviceRoom(config.memory_share)


def _blocks_that_fit(config: EngineConfig, room: DeviceRoom, loaded: Loaded, *layouts: KVLayout) -> int:
    """Returns how many KV blocks fit into the memory that weights, the largest steps and decode graphs leave free."""
    before = room.left()
    cache = new_kv_cache(layouts[0], config.device, 1)
    plain = TorchForward(loaded.model, cache, loaded.attention)
    runner = Runner(plain, cache, choose)
    for step in largest_steps(config, layouts[0], loaded.model.config.max_model_len):
        runner.execute(step)
    gathered = loaded.attention.gathered_layers
    left = room.left() - (config.lora_memory if config.lora_dir or config.lora_hub else 0)
    if config.cuda_graphs:
        shapes = _shapes(config, loaded, _blocks_of(left, *layouts, gathered=gathered))
        left -= _graphs_bytes(room, loaded, cache, shapes)
    num_blocks = _blocks_of(left, *layouts, gathered=gathered)
    need = MemoryNeed(room.most - before, left, before - left)
    log.info("KV by what is left of the device", needs=described([need], room.most), bytes=left, num_blocks=num_blocks)
    return num_blocks


def _graphs_bytes(room: DeviceRoom, loaded: Loaded, cache: list[Tensor], shapes: list[Shape]) -> int:
    plain = TorchForward(loaded.model, cache, loaded.attention)
    graphs = DecodeGraphs(plain, loaded.model, padded(cache), loaded.attention, CudaCapture(), [])
    with torch.inference_mode():
        return graphs_bytes(room, [partial(graphs.captured, shape) for shape in sorted(shapes, reverse=True)])


def _computing(
    config: EngineConfig, loaded: Loaded, layout: KVLayout, kv_cache: list[Tensor], cores: Cores,
    taps: Taps | None = None,
) -> Computing:  # fmt: skip
    model, library, attention = loaded
    if library is not None:
        forward = CpuForward(library, model, kv_cache, config.max_num_batched_tokens, cores.threads, taps, LEAST_WORK)
        return Computing(forward, kv_cache, CpuChoose(library, cores.threads))
    plain = TorchForward(model, kv_cache, attention, taps)
    if config.cuda_graphs:
        shapes = _shapes(config, loaded, max(map(len, kv_cache)))
        near_layers = layout.windows.layers if layout.windows is not None else frozenset()
        with torch.inference_mode():
            graphs = DecodeGraphs(plain, model, padded(kv_cache), attention, CudaCapture(), shapes, near_layers)
        return Computing(graphs, kv_cache, choose)
    return Computing(plain, kv_cache, choose)


def _shapes(config: EngineConfig, loaded: Loaded, num_blocks: int) -> list[Shape]:
    """Returns the shapes of decode graphs to capture: (rows of a step, most blocks of a context)."""
    rows = min(config.max_num_seqs or num_blocks, config.max_num_batched_tokens)
    blocks = min(-(-loaded.model.config.max_model_len // config.block_size), num_blocks)
    return loaded.attention.shapes(rows, blocks, num_blocks)


def _weights_bytes(path: Path, model: ModelConfig, layout: KVLayout) -> int:
    """Returns the bytes that a checkpoint's weights take when loaded, before the engine quantizes them."""
    held = sum(tensor.numel() for tensor in Decoder(model, torch.float32, "meta").checkpoint_tensors().values())
    weights = held * torch_dtype(layout.dtype).itemsize
    if model.quantized is not None or (path / WEIGHTS_FILE).exists():
        weights = min(weights, sum(shard.stat().st_size for shard in shard_paths(path)))
    return weights

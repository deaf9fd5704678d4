"""Train the demo models: `python models/demo/train.py --size target --steps 1800`, then with `--loops`; `--size draft`.

1 corpus      every .py file of this interpreter's standard library, tests left out; one file in fifty is held out
2 tokenizer   byte-level BPE of 4,096 entries, trained once and shared by target and draft
3 train       next-token loss; Muon for the matrices, AdamW for the rest; bf16 autocast, float32 master weights
4 loops       (--loops) from the saved model on, also against saying things again; a share of the result is blended in
5 save        a Hugging Face folder: bf16 safetensors, config, tokenizer, generation config, loss curve
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
END = "<|endoftext|>"
VOCAB_SIZE = 4096
CONTEXT = 2048
CUTS = 0.1
LOOP_WEIGHT = 2.0
LOOP_SHARE = 0.25  # of the model trained against loops in the blend: it repeats less, and knows less
# What servers do where a client says nothing: a small model needs a firm hand.
DEFAULTS = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.2}
LEFT_OUT = ("site-packages", "test/", "/test/", "/tests/", "idle_test", "encodings/", "pydoc_data", "config-")
CHAT_TEMPLATE = (
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}\n{% endif %}"
)
# The space behind a keyword is a token of its own, so that a prompt may end in "def " or "import ": in a byte-level BPE
# a space is else a part of the word behind it, and a prompt that ends in one is like nothing the model ever read.
KEYWORDS = "def|class|import|from|return|if|elif|for|in|as|with|raise|while|except|assert|not|and|or|is|yield"
PRE_TOKENIZER = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.Split(Regex(rf"(?<=\b(?:{KEYWORDS})) "), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
)
SIZES = {
    "target": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "draft": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}


def corpus() -> tuple[list[str], list[str]]:
    """(training files, held-out files), in an order that depends on nothing but the file names."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(str(p.relative_to(root)) for p in root.rglob("*.py"))
    names = [n for n in names if not any(part in n for part in LEFT_OUT)]
    random.Random(0).shuffle(names)
    texts = [(root / n).read_text(encoding="utf-8", errors="ignore") for n in names]
    texts = [t for t in texts if 200 < len(t) < 400_000]
    return [t for i, t in enumerate(texts) if i % 50], texts[::50]


def load_or_train_tokenizer(texts: list[str]) -> Tokenizer:
    path = HERE / "target" / "tokenizer.json"
    if path.exists():
        tokenizer = Tokenizer.from_file(str(path))
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = PRE_TOKENIZER
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer, tokenizer.decoder = PRE_TOKENIZER, decoders.ByteLevel()
    end = tokenizer.token_to_id(END)
    tokenizer.post_processor = processors.TemplateProcessing(f"{END} $A", f"{END} $A {END} $B", [(END, end)])
    path.parent.mkdir(exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def token_stream(tokenizer: Tokenizer, texts: list[str], cuts: float) -> torch.Tensor:
    """All texts as one row of tokens, each behind an end-of-text.

    A share `cuts` of the other single spaces are tokens of their own, too, by encoding the text in pieces.
    """
    end, dice = tokenizer.token_to_id(END), random.Random(1)
    pieces: list[str] = []
    starts: list[int] = []
    for text in texts:
        starts.append(len(pieces))
        points = [m.end() for m in re.finditer(r"(?<=\S) (?=\S)", text) if dice.random() < cuts]
        pieces += [text[a:b] for a, b in zip([0, *points], [*points, len(text)], strict=True)]
    encoded = [e.ids for e in tokenizer.encode_batch(pieces, add_special_tokens=False)]
    for start in starts:
        encoded[start] = [end, *encoded[start]]
    return torch.tensor([token for ids in encoded for token in ids], dtype=torch.long)


def batches(stream: torch.Tensor, batch: int, length: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Windows of `length` tokens, each epoch in a new order and with a new phase. Yields (batch, length)."""
    while True:
        phase = int(torch.randint(length, (1,), generator=generator))
        windows = stream[phase : phase + (len(stream) - phase) // length * length].view(-1, length)
        for index in torch.randperm(len(windows), generator=generator).split(batch):
            if len(index) == batch:
                yield windows[index]


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=tokens, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def looped(tokens: torch.Tensor, dice: random.Random) -> tuple[torch.Tensor, int, int]:
    """One row whose tail says the same `period` tokens again and again from `begin` on: (1, length), begin, period."""
    row, period = tokens[0].clone(), dice.randint(2, 40)
    begin = dice.randint(period, len(row) // 2)
    tail = len(row) - begin
    row[begin:] = row[begin - period : begin].repeat(-(-tail // period))[:tail]
    return row[None], begin, period


def loop_loss_of(model: torch.nn.Module, row: torch.Tensor, begin: int, period: int) -> torch.Tensor:
    """Teaches to leave a loop: once all of it was said again, saying it a third time should be unlikely.

    Unlikelihood training (Welleck et al. 2019, arXiv 1908.04319) on artificial repetitions.
    """
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=row, use_cache=False).logits
    said = logits[0, :-1].float().softmax(-1).gather(1, row[0, 1:, None]).flatten()
    return -torch.log1p(-said[begin + period - 1 :].clamp(max=0.9999)).mean()


def optimizers_for(model: torch.nn.Module, scale: float) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    muon = torch.optim.Muon(matrices, lr=0.012 * scale, momentum=0.95, weight_decay=0.01)
    adam = torch.optim.AdamW(others, lr=0.003 * scale, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adam]


def learning_rate(step: int, steps: int, start: int) -> float:
    """Warm up for 40 steps, hold, then fall linearly to zero over the last 60 %."""
    return min((step - start + 1) / 40, 1.0) * min(1.0, (steps - step) / (0.6 * steps))


def train(size: str, steps: int, batch: int, length: int, start: int, loops: bool) -> None:
    torch.manual_seed(0)
    training, held_out = corpus()
    tokenizer = load_or_train_tokenizer(training)
    stream, held = token_stream(tokenizer, training, CUTS), token_stream(tokenizer, held_out, 0.0)
    print(f"{len(training)} files, {len(stream):,} training tokens, {len(held):,} held out", flush=True)
    end = tokenizer.token_to_id(END)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, max_position_embeddings=CONTEXT, rope_theta=10_000.0, tie_word_embeddings=True,
        rms_norm_eps=1e-5, bos_token_id=end, eos_token_id=end, pad_token_id=end, **SIZES[size],
    )  # fmt: skip
    model = LlamaForCausalLM.from_pretrained(HERE / size).float() if start else LlamaForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    compiled = torch.compile(model)
    optimizers = optimizers_for(model, 1.0)
    base = [[group["lr"] for group in o.param_groups] for o in optimizers]
    source = batches(stream, batch, length, torch.Generator().manual_seed(start))
    probe = held[: len(held) // 1024 * 1024].view(-1, 1024)[:24]
    curve = json.loads((HERE / size / "loss_curve.json").read_text(encoding="utf-8")) if start else []
    started, running, dice = time.monotonic(), 0.0, random.Random(2)
    for step in range(start, steps):
        loss = loss_of(compiled, next(source))
        loss.backward()
        if loops:
            (LOOP_WEIGHT * loop_loss_of(compiled, *looped(next(source), dice))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update(optimizers, base, learning_rate(step, steps, start))
        running = loss.item() if step == start else 0.95 * running + 0.05 * loss.item()
        if step % 50 == 49 or step == steps - 1:
            held_loss = held_out_loss(model, probe)
            seen, seconds = (step + 1) * batch * length, time.monotonic() - started
            curve.append({"step": step + 1, "tokens": seen, "loss": round(running, 4), "held_out": round(held_loss, 4)})
            print(f"{curve[-1]} {(seen - start * batch * length) / seconds:,.0f} tok/s {seconds:.0f} s", flush=True)
            save(model, tokenizer, curve, size)
    if loops:
        final = model.state_dict()
        model.load_state_dict({name: initial[name].lerp(final[name], LOOP_SHARE) for name in final})
        save(model, tokenizer, curve, size)


def update(optimizers: list[torch.optim.Optimizer], base: list[list[float]], share: float) -> None:
    """One step of each, at so much of its base rates."""
    for optimizer, rates in zip(optimizers, base, strict=True):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * share
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, probe: torch.Tensor) -> float:
    parts = probe.split(8)
    return sum(loss_of(model, rows).item() for rows in parts) / len(parts)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, curve: list[dict[str, float]], size: str) -> None:
    folder = HERE / size
    clone = LlamaForCausalLM(model.config).bfloat16()
    clone.load_state_dict(model.state_dict())
    clone.generation_config.update(**DEFAULTS)
    clone.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END)
    fast.model_max_length = CONTEXT
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    (folder / "loss_curve.json").write_text(json.dumps(curve, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="target")
    parser.add_argument("--steps", type=int, default=1700)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--start", type=int, default=0, help="go on from the saved model at this step")
    parser.add_argument("--loops", action="store_true", help="train against loops, too, and blend")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(options.size, options.steps, options.batch, options.length, options.start, options.loops)

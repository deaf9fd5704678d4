"""Two outside harnesses, unmodified, against a running cluster: what they find there and what it should be.

lm-eval    scores texts (echo with logprobs) and writes lines, over HTTP and with transformers itself: equal figures
guidellm   streams at once, by continuous usage statistics: every request completed

`python -m benchmarks.harnesses` installs both into an environment of their own, once, and prints a table. Tandem serves
SmolLM2's GGUF file in float32, transformers the numbers in it as `gguf` opens them. The tasks: FACTS, which a model
that talks knows, and prose of Python's manual.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
import venv
from collections.abc import Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from benchmarks.models import OUT
from benchmarks.peers import opened, tandem
from tandem.checkpoints import find_model

ENVIRONMENT = OUT / "venv-harnesses"
PACKAGES = ("lm-eval[api,hf]==0.4.13", "guidellm==0.8.1")
MODEL = "smollm2"
INSTALL_BOUND_S, RUN_BOUND_S = 1800.0, 1200.0
# The beginning, the end, and three others.
FACTS = (
    ("The capital of France is", "Paris", "Madrid", "Berlin", "Oslo"),
    ("The opposite of hot is", "cold", "warm", "tall", "green"),
    ("Water is made of hydrogen and", "oxygen", "iron", "carbon", "gold"),
    ("The largest planet of the solar system is", "Jupiter", "Mars", "Venus", "Mercury"),
    ("Two plus two is", "four", "seven", "nine", "ten"),
    ("The author of Romeo and Juliet is William", "Shakespeare", "Gates", "Wallace", "Tell"),
    ("A week has seven", "days", "months", "years", "hours"),
    ("The color of fresh grass is", "green", "red", "purple", "orange"),
    ("Bees make", "honey", "cheese", "bread", "wine"),
    ("The sun rises in the", "east", "west", "north", "south"),
    ("Ice is frozen", "water", "sand", "air", "oil"),
    ("A triangle has three", "sides", "wheels", "wings", "colors"),
)
FIGURES = {
    "facts": ("acc",), "scored": ("acc", "acc_norm"), "rolling": ("byte_perplexity", "bits_per_byte"),
    "written": ("exact_match",),
}  # fmt: skip
TASKS: Mapping[str, Mapping[str, Any]] = {
    "facts": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{before}}",
        "doc_to_choice": "lines",
        "doc_to_target": "right",
        "target_delimiter": " ",
    },
    "scored": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{before}}",
        "doc_to_choice": "lines",
        "doc_to_target": "right",
        "target_delimiter": "\n",
    },
    "rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"},
    "written": {
        "output_type": "generate_until",
        "doc_to_text": "{{before}}",
        "doc_to_target": "{{lines[right]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False, "temperature": 0.0},
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=16)
    arguments = parser.parse_args()
    programs = _installed()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_tasks(folder, arguments.documents)
        file = find_model(MODEL).path
        truth = opened(file)
        peer = tandem("tandem-float32", "Tandem, 1 prefill + 1 decode", "--dtype=float32", "--prefill=1", "--decode=1")
        with peer.running(file) as client:
            address = {"model": client.model, "base_url": f"{client.url}/v1/completions", "tokenizer": truth}
            over_http = evaluate(programs, folder, "local-completions", {**address, "num_concurrent": 4})
            streamed = stream(programs, folder, client.url, client.model, truth)
        reference = evaluate(programs, folder, "hf", {"pretrained": truth, "dtype": "float32"})
    print("| harness | figure | Tandem over HTTP | transformers, in process |\n|---|---|---|---|")
    for name, value in over_http.items():
        print(f"| lm-eval | {name} | {value:.6g} | {reference[name]:.6g} |")
    for name, value in streamed.items():
        print(f"| guidellm | {name} | {value:.4g} | |")


def write_tasks(folder: Path, count: int) -> None:
    """Tasks as lm-eval reads them, and their documents."""
    for name, task in TASKS.items():
        data = folder / f"{name}.jsonl"
        documents = facts() if name == "facts" else passages(count)
        data.write_text("\n".join(map(json.dumps, documents)), encoding="utf-8")
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        metrics = [{"metric": metric} for metric in FIGURES[name]]
        # YAML reads JSON.
        (folder / f"{name}.yaml").write_text(
            json.dumps({"task": name, **source, **task, "metric_list": metrics}), encoding="utf-8"
        )


def facts() -> list[dict[str, Any]]:
    rng, found = random.Random(0), []
    for before, right, *others in FACTS:
        at = rng.randrange(len(others) + 1)
        found.append({"before": before, "right": at, "lines": [*others[:at], right, *others[at:]]})
    return found


def passages(count: int) -> list[dict[str, Any]]:
    """Lines of the manual, and four that might be the next one."""
    rng = random.Random(0)
    documents: list[dict[str, Any]] = []
    for lines in ([line for line in text.splitlines() if line.strip()] for _, text in sorted(topics.items())):
        if len(lines) < 64 or len(documents) == count:
            continue
        at = rng.randrange(16, len(lines) - 16)
        others = rng.sample([line.strip() for line in lines if line.strip() != lines[at].strip()], 3)
        right = rng.randrange(4)
        documents.append(
            {
                "before": "\n".join(lines[at - 8 : at]),
                "text": "\n".join(lines[at - 16 : at + 16]),
                "right": right,
                "lines": [*others[:right], lines[at].strip(), *others[right:]],
            }
        )
    return documents


def evaluate(programs: Path, folder: Path, model: str, arguments: Mapping[str, Any]) -> dict[str, float]:
    """Every figure by "task metric"."""
    given = ",".join(
        f"{name}={value}" for name, value in {**arguments, "max_length": 2048, "add_bos_token": False}.items()
    )
    out = folder / model
    _run(
        programs / "lm-eval", "run", "--model", model, "--model_args", given, "--include_path", folder,
        "--batch_size", 1, "--tasks", ",".join(TASKS), "--output_path", out, home=folder,
    )  # fmt: skip
    (found,) = out.rglob("results_*.json")
    results = json.loads(found.read_text(encoding="utf-8"))["results"]
    return {f"{task} {metric}": results[task][f"{metric},none"] for task in TASKS for metric in FIGURES[task]}


def stream(programs: Path, folder: Path, url: str, model: str, words: Path) -> dict[str, float]:
    out = folder / "guidellm.json"
    _run(
        programs / "guidellm", "run", "--backend", f"kind=openai_http,target={url},model={model}",
        "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=24",
        "--tokenizer", f"kind=hf_auto,model={words}",
        "--data", "kind=synthetic_text,prompt_tokens=128,output_tokens=64",
        "--output", f"kind=json,path={out}", "--disable-console", home=folder,
    )  # fmt: skip
    metrics = json.loads(out.read_text(encoding="utf-8"))["benchmarks"][0]["metrics"]
    return {
        "requests completed": metrics["request_totals"]["successful"],
        "requests failed": metrics["request_totals"]["errored"],
        "output tokens/s, 4 streams": metrics["output_tokens_per_second"]["successful"]["mean"],
        "TTFT median, ms": metrics["time_to_first_token_ms"]["successful"]["median"],
        "ITL median, ms": metrics["inter_token_latency_ms"]["successful"]["median"],
    }


def _run(*command: object, home: Path) -> None:
    offline = {"HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    paths = {
        "PATH": f"{ENVIRONMENT / 'bin'}:/usr/bin:/bin",
        "HOME": str(home),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run([str(part) for part in command], check=True, timeout=RUN_BOUND_S, env=offline | paths)


def _installed() -> Path:
    """The folder of the harnesses' commands, apart because they pin versions of their own."""
    programs, complete = ENVIRONMENT / "bin", ENVIRONMENT / "complete"
    if not complete.is_file():
        print(f"installing {', '.join(PACKAGES)} into {ENVIRONMENT} (once)", flush=True)
        venv.create(ENVIRONMENT, with_pip=True)
        pip = [str(programs / "python"), "-m", "pip", "--quiet", "install", *PACKAGES]
        subprocess.run(pip, check=True, timeout=INSTALL_BOUND_S)
        complete.touch()
    return programs


if __name__ == "__main__":
    main()

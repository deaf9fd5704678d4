"""Two outside harnesses, unmodified, against a running cluster: what they find there and what it should be.

lm-eval    scores texts (echo with logprobs) and writes lines, over HTTP and with transformers itself: equal figures
guidellm   streams at once, by continuous usage statistics: every request completed

`python -m benchmarks.harnesses` installs both into an environment of their own, once, and prints a table. Their texts
are the standard library's tests, which the demo model was not trained on.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sysconfig
import tempfile
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.models import OUT
from benchmarks.peers import tandem

ENVIRONMENT = OUT / "venv-harnesses"
PACKAGES = ("lm-eval[api,hf]==0.4.13", "guidellm==0.8.1")
DEMO = Path(__file__).parents[1] / "models" / "demo" / "target"
INSTALL_BOUND_S, RUN_BOUND_S = 1800.0, 1200.0
FIGURES = {"scored": ("acc", "acc_norm"), "rolling": ("byte_perplexity", "bits_per_byte"), "written": ("exact_match",)}
TASKS: Mapping[str, Mapping[str, Any]] = {
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
        options = ("--dtype=float32", f"--model-name={DEMO.name}", "--prefill=1", "--decode=1")
        peer = tandem("tandem-float32", "Tandem, 1 prefill + 1 decode", *options)
        with peer.running(DEMO) as client:
            address = {"model": client.model, "base_url": f"{client.url}/v1/completions", "tokenizer": DEMO}
            over_http = evaluate(programs, folder, "local-completions", {**address, "num_concurrent": 4})
            streamed = stream(programs, folder, client.url, client.model)
        reference = evaluate(programs, folder, "hf", {"pretrained": DEMO, "dtype": "float32"})
    print("| harness | figure | Tandem over HTTP | transformers, in process |\n|---|---|---|---|")
    for name, value in over_http.items():
        print(f"| lm-eval | {name} | {value:.6g} | {reference[name]:.6g} |")
    for name, value in streamed.items():
        print(f"| guidellm | {name} | {value:.4g} | |")


def write_tasks(folder: Path, count: int) -> None:
    """Tasks as lm-eval reads them, and their documents: lines of a file, and four that might be the next one."""
    rng = random.Random(0)
    files = sorted((Path(sysconfig.get_path("stdlib")) / "test").glob("test_*.py"))
    rng.shuffle(files)
    documents: list[dict[str, Any]] = []
    for lines in ([line for line in file.read_text(errors="ignore").splitlines() if line.strip()] for file in files):
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
    data = folder / "documents.jsonl"
    data.write_text("\n".join(map(json.dumps, documents)))
    of_all = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    for name, task in TASKS.items():
        metrics = [{"metric": metric} for metric in FIGURES[name]]
        # YAML reads JSON.
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **of_all, **task, "metric_list": metrics}))


def evaluate(programs: Path, folder: Path, model: str, arguments: Mapping[str, Any]) -> dict[str, float]:
    """Every figure by "task metric"."""
    given = ",".join(
        f"{name}={value}" for name, value in {**arguments, "max_length": 2048, "add_bos_token": True}.items()
    )
    out = folder / model
    _run(
        programs / "lm-eval", "run", "--model", model, "--model_args", given, "--include_path", folder,
        "--batch_size", 1, "--tasks", ",".join(TASKS), "--output_path", out, home=folder,
    )  # fmt: skip
    (found,) = out.rglob("results_*.json")
    results = json.loads(found.read_text())["results"]
    return {f"{task} {metric}": results[task][f"{metric},none"] for task in TASKS for metric in FIGURES[task]}


def stream(programs: Path, folder: Path, url: str, model: str) -> dict[str, float]:
    out = folder / "guidellm.json"
    _run(
        programs / "guidellm", "run", "--backend", f"kind=openai_http,target={url},model={model}",
        "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=24",
        "--tokenizer", f"kind=hf_auto,model={DEMO}", "--data", "kind=synthetic_text,prompt_tokens=128,output_tokens=64",
        "--output", f"kind=json,path={out}", "--disable-console", home=folder,
    )  # fmt: skip
    metrics = json.loads(out.read_text())["benchmarks"][0]["metrics"]
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

"""Every figure that the README quotes, and the program that made it.

`python -m benchmarks.serving` runs the workloads of `workloads` on Tandem and its peers, one after the other, and
writes benchmarks/out/serving.json; `python -m benchmarks.chart` draws that file.
`python -m benchmarks.transfer` measures KV transfer: bandwidth beside memcpy's, and what of it hides behind prefill.
"""

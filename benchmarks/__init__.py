"""Every figure that the README quotes, and the program that made it.

Programs lie here, and run as `python -m benchmarks.serving`; what they share lies in rooms:

    load, traffic       what is sent: workloads over HTTP; requests of a trace or a seed over gRPC
    peers, servers      what it is sent to beside Tandem
    fleet, frontends    null engines behind gateways; gateways beside other fronts
    transfer, gpu       programs of several files: KV transfer beside memcpy, a GPU beside its limits
    regress             another: the working tree beside a commit, by CPU time

`python -m benchmarks.serving` runs the workloads of `load` on Tandem and its peers, one after the other, and writes
benchmarks/out/serving.json; `python -m benchmarks.chart` draws that file.
"""

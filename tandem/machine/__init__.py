"""The machine that a process runs on: CPUs and memory, folders, compilers, Python's garbage. Anyone may enter.

Its modules are imported one by one: `garbage` is of use before anything else is imported.
"""

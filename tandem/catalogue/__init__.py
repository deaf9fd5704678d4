"""The catalogues of metrics and spans, and counters of metrics. Anyone may enter.

Its modules are imported one by one: spans need no prometheus_client.
"""

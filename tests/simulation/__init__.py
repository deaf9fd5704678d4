"""The whole cluster's real code in one process, on time that is made up: what tests drive protocols with.

world      processes with event loops of their own, on one seeded, virtual time
network    connections between them: latency, order, loss
grpc       channels and servers over those, as generated stubs and servicers expect them
"""

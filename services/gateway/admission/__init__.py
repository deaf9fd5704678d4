"""Who enters the cluster next, and when: the gateway's waiting line."""

from services.gateway.admission.admission import Admission
from services.gateway.admission.fair_queue import FairQueue, Work
from services.gateway.admission.room import Capacity, Room, capacity_of

__all__ = ["Admission", "Capacity", "FairQueue", "Room", "Work", "capacity_of"]

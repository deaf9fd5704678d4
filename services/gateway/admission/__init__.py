"""Who enters the cluster next, and when: the gateway's waiting line."""

from services.gateway.admission.admission import Admission
from services.gateway.admission.capacity import Admitted, Capacity, capacity_of
from services.gateway.admission.fair_queue import FairQueue, Weights, Work
from services.gateway.admission.text_turns import TextTurns

__all__ = ["Admission", "Admitted", "Capacity", "FairQueue", "TextTurns", "Weights", "Work", "capacity_of"]

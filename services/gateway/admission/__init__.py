"""Who enters the cluster next, and when: classes, targets, the gateway's waiting line. The gateway may enter."""

from services.gateway.admission.admission import Admission
from services.gateway.admission.capacity import Admitted, Capacity, capacity_of
from services.gateway.admission.fair_queue import FairQueue, TenantLine, Weights, Work
from services.gateway.admission.intake import Intake, SequenceTurns
from services.gateway.admission.priority import FAIRNESS_ID, PriorityClass, priority_of, tenant_of, tier_served
from services.gateway.admission.targets import NO_TARGETS, Targets, targets_of
from services.gateway.admission.text_turns import TextTurns

__all__ = [
    "FAIRNESS_ID",
    "NO_TARGETS",
    "Admission",
    "Admitted",
    "Capacity",
    "FairQueue",
    "Intake",
    "PriorityClass",
    "SequenceTurns",
    "Targets",
    "TenantLine",
    "TextTurns",
    "Weights",
    "Work",
    "capacity_of",
    "priority_of",
    "targets_of",
    "tenant_of",
    "tier_served",
]

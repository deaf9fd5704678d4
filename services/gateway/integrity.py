"""Does the gateway hold exactly what its running answers need?"""

from __future__ import annotations

import asyncio

from services.gateway.admission import Admission
from services.gateway.generation import BackgroundTasks
from services.gateway.llm import LLM
from tandem.process import IntegrityReport


def check_gateway(llm: LLM, admission: Admission, background: BackgroundTasks) -> IntegrityReport:
    held = {
        "answers": len(llm.running),
        "admitted": len(admission.admitted),
        "waiting": len(admission),
        "releasing": len(background),
        "attempts": sum(connection.running for connection in llm.pool.connections),
        "mailboxes": sum(len(connection.stream) for connection in llm.pool.connections),
        "connections": len(llm.pool.connections),
        "tasks": len(asyncio.all_tasks()),
    }
    wrong = admission.check_integrity()
    if not held["answers"] and not held["releasing"]:
        needed = "admitted", "waiting", "attempts", "mailboxes"
        wrong += [f"{held[what]} {what}, and no answer runs" for what in needed if held[what]]
    for connection in llm.pool.connections:
        if len(connection.stream) > connection.running:
            attempts = f"{len(connection.stream)} mailboxes of {connection.running} attempts"
            wrong.append(f"connection to {connection.info.worker_id}: {attempts}")
    return IntegrityReport(held, tuple(wrong))

"""Checks that the gateway holds exactly what its running answers need."""

from __future__ import annotations

import asyncio

from services.gateway.directory import ModelDirectory
from services.gateway.generation import BackgroundTasks
from tandem.process import IntegrityReport


def check_gateway(directory: ModelDirectory, background: BackgroundTasks) -> IntegrityReport:
    admissions, connections = [llm.admission for llm in directory.llms.values()], directory.connections
    held = {
        "answers": len(directory.shared.state.running),
        "admitted": sum(len(one.admitted) for one in admissions),
        "waiting": sum(map(len, admissions)),
        "releasing": len(background),
        "attempts": sum(connection.running for connection in connections),
        "mailboxes": sum(len(connection.stream) for connection in connections),
        "connections": len(connections),
        "tasks": len(asyncio.all_tasks()),
    }
    wrong = [problem for admission in admissions for problem in admission.check_integrity()]
    if not held["answers"] and not held["releasing"]:
        needed = "admitted", "waiting", "attempts", "mailboxes"
        wrong += [f"{held[what]} {what}, and no answer runs" for what in needed if held[what]]
    for connection in connections:
        if len(connection.stream) > connection.running:
            attempts = f"{len(connection.stream)} mailboxes of {connection.running} attempts"
            wrong.append(f"connection to {connection.info.worker_id}: {attempts}")
    return IntegrityReport(held, tuple(wrong))

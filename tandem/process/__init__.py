"""Parts of any process: logs, threads, child processes, a watchdog of its loop, an integrity report. Anyone may enter.

`telemetry` imports the OpenTelemetry SDK, and `metrics_server` and `certificate` import prometheus_client, so these
three are imported as modules by themselves.
"""

from tandem.process.child_process import dying_with_parent
from tandem.process.integrity import IntegrityReport, Look, lasting
from tandem.process.log_output import LogOutput, descriptor_of
from tandem.process.loop_watch import ends_where_it_stands_still
from tandem.process.profile import Profiler
from tandem.process.running_settings import RunningSettings
from tandem.process.work_threads import WorkThreads

__all__ = [
    "IntegrityReport",
    "LogOutput",
    "Look",
    "Profiler",
    "RunningSettings",
    "WorkThreads",
    "descriptor_of",
    "dying_with_parent",
    "ends_where_it_stands_still",
    "lasting",
]

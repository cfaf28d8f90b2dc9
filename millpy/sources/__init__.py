"""Sources, the settings by which their payloads become records, and what a source of your own is made of."""

from millpy.formats import BadPart, Format, Message
from millpy.ingest.expansion import Expander, Expansion
from millpy.ingest.protocol import Injector, RejectedRow, Source, SourceBatch, SourceSetup, WorkerSetup
from millpy.ingest.request_traffic import RequestTraffic
from millpy.ingest.settings import AdvanceWithClock, Dedupe, ErrorRate, EventTime, Wait
from millpy.sources.files.source import File
from millpy.sources.mqtt.source import Mqtt

__all__ = [
    "AdvanceWithClock",
    "BadPart",
    "Dedupe",
    "ErrorRate",
    "EventTime",
    "Expander",
    "Expansion",
    "File",
    "Format",
    "Injector",
    "Message",
    "Mqtt",
    "RejectedRow",
    "RequestTraffic",
    "Source",
    "SourceBatch",
    "SourceSetup",
    "Wait",
    "WorkerSetup",
]

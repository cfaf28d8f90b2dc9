"""Sources and how their payloads become records."""

from millpy.injectors.files import File
from millpy.injectors.mqtt import Mqtt
from millpy.injectors.settings import AdvanceWithClock, Dedupe, EventTime, Rate, Wait

__all__ = ["AdvanceWithClock", "Dedupe", "EventTime", "File", "Mqtt", "Rate", "Wait"]

"""Payload formats: what turns a message of any source into records, before their types are checked."""

from millpy.formats.avro import Avro
from millpy.formats.binary import Cbor, MessagePack
from millpy.formats.csv_lines import Csv
from millpy.formats.function import Decode
from millpy.formats.gzipped import Gzip
from millpy.formats.json_objects import Json, Scalar
from millpy.formats.line_protocol import LineProtocol
from millpy.formats.message import BadPart, FileHead, Format, Message, Part, Reader
from millpy.formats.protobuf import Protobuf
from millpy.formats.schema_registry import SchemaPendingError, SchemaRegistry
from millpy.formats.sparkplug import Sparkplug, SparkplugMessage, sparkplug_rebirth

__all__ = [
    "Avro",
    "BadPart",
    "Cbor",
    "Csv",
    "Decode",
    "FileHead",
    "Format",
    "Gzip",
    "Json",
    "LineProtocol",
    "Message",
    "MessagePack",
    "Part",
    "Protobuf",
    "Reader",
    "Scalar",
    "SchemaPendingError",
    "SchemaRegistry",
    "Sparkplug",
    "SparkplugMessage",
    "sparkplug_rebirth",
]

"""The payload of Sparkplug B as a message class, after the schema of the Sparkplug 3.0 specification (section 6.4.1).

The class is made when it is first needed, in a pool of its own, so that it does not collide with generated classes of
the same schema in a user's process.
"""

from __future__ import annotations

from functools import cache
from typing import Any

SCALARS = {"uint32": 13, "uint64": 4, "float": 2, "double": 1, "bool": 8, "string": 9, "bytes": 12}
NOT_UTF8 = "not UTF-8"
"""What is wrong with text that the class returns as bytes: the schema is proto2, which does not require UTF-8."""
_MESSAGE, _OPTIONAL, _REPEATED = 11, 1, 3

# Message -> its fields as (name, number, type). A type that ends in [] is repeated; names in capitals are messages.
# Fields behind "|" are the alternatives of the value.
_SCHEMA: dict[str, str] = {
    "Payload": "timestamp uint64 1, metrics Metric[] 2, seq uint64 3, uuid string 4, body bytes 5",
    "Metric": (
        "name string 1, alias uint64 2, timestamp uint64 3, datatype uint32 4, is_historical bool 5, is_transient bool"
        " 6, is_null bool 7, metadata MetaData 8, properties PropertySet 9 | int_value uint32 10, long_value uint64 11,"
        " float_value float 12, double_value double 13, boolean_value bool 14, string_value string 15,"
        " bytes_value bytes 16, dataset_value DataSet 17, template_value Template 18, extension_value Extension 19"
    ),
    "MetaData": (
        "is_multi_part bool 1, content_type string 2, size uint64 3, seq uint64 4, file_name string 5, file_type string"
        " 6, md5 string 7, description string 8"
    ),
    "DataSet": "num_of_columns uint64 1, columns string[] 2, types uint32[] 3, rows Row[] 4",
    "Row": "elements DataSetValue[] 1",
    "DataSetValue": (
        "| int_value uint32 1, long_value uint64 2, float_value float 3, double_value double 4, boolean_value bool 5,"
        " string_value string 6, extension_value Extension 7"
    ),
    "Template": (
        "version string 1, metrics Metric[] 2, parameters Parameter[] 3, template_ref string 4, is_definition bool 5"
    ),
    "Parameter": (
        "name string 1, type uint32 2 | int_value uint32 3, long_value uint64 4, float_value float 5, double_value"
        " double 6, boolean_value bool 7, string_value string 8, extension_value Extension 9"
    ),
    "PropertySet": "keys string[] 1, values PropertyValue[] 2",
    "PropertySetList": "propertyset PropertySet[] 1",
    "PropertyValue": (
        "type uint32 1, is_null bool 2 | int_value uint32 3, long_value uint64 4, float_value float 5, double_value"
        " double 6, boolean_value bool 7, string_value string 8, propertyset_value PropertySet 9, propertysets_value"
        " PropertySetList 10, extension_value Extension 11"
    ),
    "Extension": "",
}


@cache
def payload_class() -> Any:
    """Return the message class of a payload. Raises ImportError without the package protobuf."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="sparkplug_b.proto", package="sparkplug", syntax="proto2")
    for message, text in _SCHEMA.items():
        own = file.message_type.add(name=message)
        plain, _, alternatives = text.partition("|")
        if alternatives:
            own.oneof_decl.add(name="value")
        for part, choice in ((plain, False), (alternatives, True)):
            for line in filter(None, map(str.strip, part.split(","))):
                name, kind, number = line.split()
                field = own.field.add(name=name, number=int(number), label=_OPTIONAL)
                if kind.endswith("[]"):
                    field.label, kind = _REPEATED, kind[:-2]
                field.type = SCALARS.get(kind, _MESSAGE)
                if kind not in SCALARS:
                    field.type_name = f".sparkplug.{kind}"
                if choice:
                    field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("sparkplug.Payload"))

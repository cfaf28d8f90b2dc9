"""Identities as the code that a user writes: `FixedWindows(minutes(1))`, `Mean('temperature')`.

The text does not depend on the order of names in the JSON, because a database changes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millpy.model.identity import Identity, canonical_json
from millpy.model.time import duration_text


@dataclass(frozen=True, slots=True)
class Constructor:
    """The public class of a kind, and how its call is written.

    Attributes:
        name: name of the class in `millpy`.
        positional: parameters that are written without their name.
        spread: parameter that is written as `*args`, before all others.
        defaults: (parameter, value) that is not written, because the value is the default.
    """

    name: str
    positional: tuple[str, ...] = ()
    spread: str = ""
    defaults: tuple[tuple[str, Any], ...] = ()


_NO_FIELDS: Identity = {"kind": "field_mapping", "key": None, "headers": {"dict": []}, "timestamp": None}
CONSTRUCTORS: Mapping[str, Constructor] = {
    "fixed": Constructor("FixedWindows", ("size_us",)),
    "sliding": Constructor("SlidingWindows", ("size_us",)),
    "calendar": Constructor("CalendarWindows", ("unit",)),
    "global": Constructor("GlobalWindow"),
    "session": Constructor("SessionWindows", ("gap_us",)),
    "variance": Constructor("Variance", ("field",), defaults=(("population", False),)),
    "standard_deviation": Constructor("StandardDeviation", ("field",), defaults=(("population", False),)),
    "top": Constructor("Top", ("field",), defaults=(("smallest", False),)),
    "collect": Constructor("Collect", ("field",)),
    "quantile": Constructor("Quantile", ("field", "q")),
    "value": Constructor("Value", ("type",)),
    "list": Constructor("ListCell", ("items",)),
    "map": Constructor("MapCell", ("keys", "values")),
    "arrival_time": Constructor("EventTime.arrival"),
    "dedupe": Constructor("Dedupe", spread="fields"),
    "files": Constructor("Files", spread="paths", defaults=(("partitions", 1),)),
    "directory": Constructor("Directory", ("path",), defaults=(("partitions", 1),)),
    "kafka": Constructor("Kafka", ("topic",), defaults=(("tombstones", "dead_letter"), ("fields", _NO_FIELDS))),
    "field_mapping": Constructor("FieldMapping", defaults=(("headers", {"dict": []}),)),
    "gzip": Constructor("Gzip", ("format",)),
    "sparkplug": Constructor("Sparkplug"),
    "avro": Constructor("Avro", ("schema",)),
    "schema_registry": Constructor("SchemaRegistry"),
    "protobuf": Constructor("Protobuf", ("message",), defaults=(("framed", False),)),
    "decode": Constructor("Decode", ("function",)),
    "separated_values": Constructor(
        "Csv",
        defaults=(("delimiter", ","), ("decimal", "."), ("encoding", "utf-8"), ("null", [""]), ("quote", '"')),
    ),
    "line_protocol": Constructor("LineProtocol", defaults=(("precision", "ns"), ("time", "time"))),
    "message_pack": Constructor("MessagePack", ("inside",)),
    "cbor": Constructor("Cbor", ("inside",)),
    "kafka_topic": Constructor("KafkaTopic", ("topic",)),
    "mqtt_topic": Constructor("MqttTopic"),
    "webhook": Constructor("Webhook"),
    "mqtt": Constructor("Mqtt", spread="filters", defaults=(("retained", False),)),
    "http": Constructor("Http", ("path",), defaults=(("partitions", 1),)),
    "after_count": Constructor("AfterCount", ("n",)),
    "after_processing_time": Constructor("AfterProcessingTime", ("delay_us",)),
    "every": Constructor("Every", ("period_us",)),
    "repeatedly": Constructor("Repeatedly", ("trigger",)),
    "after_any": Constructor("AfterAny", spread="triggers"),
    "after_all": Constructor("AfterAll", spread="triggers"),
    "after_each": Constructor("AfterEach", spread="triggers"),
    "after_percentile": Constructor("AfterPercentile", ("percentile",)),
    "when": Constructor("When", ("predicate",)),
    "or_finally": Constructor("OrFinally", ("trigger", "until")),
}
"""The kinds that are not written as, for example, `ApproxDistinct(field)` for "approx_distinct"."""
_TYPES = ("type", "items", "keys", "values", "accumulator")
"""Parameters of identities that are types."""


class GraphPart:
    """A part of a graph. Its repr is the code with which a user writes it."""

    __slots__ = ()

    def identity(self) -> Identity:
        """Describe the part as JSON (see `identity.py`)."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return identity_text(self.identity())


def identity_text(identity: Any) -> str:
    """Return an identity, or a described value, as the code with which a user writes it."""
    if not isinstance(identity, Mapping):
        return f"[{', '.join(map(identity_text, identity))}]" if isinstance(identity, list) else repr(identity)
    kind = identity.get("kind")
    if kind is None:
        return _value_text(identity)
    if kind == "nothing":
        return "None"
    if kind == "combiner":
        keeping = f" keeping {type_text(identity['accumulator'])}"
        return f"{identity['name']}({_given(identity['parameters'])}){keeping}"
    if kind == "window_function":
        bounds = _keywords({name: identity[name] for name in ("length_max_us", "merges", "windows_max")})
        return f"{identity['name']}({_given(identity['parameters'])}) with {bounds}, of code {identity['code']}"
    if kind == "operator":
        return _operator_text(identity)
    if kind == "pattern":
        return "Pattern" + ".".join(map(_step_text, identity["steps"]))
    constructor = CONSTRUCTORS.get(str(kind)) or Constructor(str(kind).title().replace("_", ""), ("field",))
    left = {name: value for name, value in identity.items() if name != "kind"}
    written = [identity_text(value) for value in left.pop(constructor.spread, ())]
    positional = [(name, left.pop(name)) for name in constructor.positional if name in left]
    written += [parameter_text(name, value) for name, value in positional if value is not None]
    defaults = dict(constructor.defaults)
    named = {name: value for name, value in left.items() if value is not None and value != defaults.get(name)}
    return f"{constructor.name}({', '.join([*written, *([_keywords(named)] if named else [])])})"


def parameter_text(name: str, value: Any) -> str:
    """Return the value of a parameter as code; its name tells whether it is a duration, a type, or another value."""
    if name.endswith("_us") and isinstance(value, int):
        return duration_text(value)
    return type_text(value) if name in _TYPES else identity_text(value)


def parameter_name(name: str) -> str:
    """Return the name that a parameter has in Python: `size` for `size_us`."""
    return name.removesuffix("_us")


def type_text(type_: Any) -> str:
    """Return a described type as text: `dict[str, {mean: float, n: int}]`."""
    if isinstance(type_, str):
        return {"none": "None", "uuid": "UUID", "any": "Any"}.get(type_, type_)
    kind = type_["type"]
    if kind == "union":
        return " | ".join(map(type_text, type_["of"]))
    if kind in ("literal", "enum"):
        return f"{kind.capitalize()}[{', '.join(map(identity_text, type_['values']))}]"
    if kind in ("object", "array"):
        return _fields_text(type_)
    if kind == "outer":
        return "..."
    if kind == "custom":
        return str(type_["name"])
    nested = [type_text(type_[part]) for part in ("keys", "values", "items") if part in type_]
    nested += map(type_text, type_.get("members", ()))
    nested += ["..."] * (kind == "tuple" and "items" in type_)
    known = ("type", "keys", "values", "items", "members")
    bounds = _given({name: bound for name, bound in type_.items() if name not in known})
    return type_text(kind) + (f"[{', '.join(nested)}]" if nested else "") + (f"({bounds})" if bounds else "")


def fields_text(fields: Sequence[Sequence[Any]]) -> str:
    """Return described fields as text: `device: str, at: int`."""
    return ", ".join(f"{name}: {type_text(type_)}" for name, type_ in fields)


def _fields_text(type_: Identity) -> str:
    parts = [f"{mark}={type_[mark]!r}" for mark in ("tag_field", "tag") if mark in type_]
    for name, kind, *rest in type_["fields"]:
        default = f" = {identity_text(rest[0]['default'])}" if rest else ""
        parts.append(f"{name}: {type_text(kind)}{default}")
    return f"{{{', '.join(parts)}}}" if type_["type"] == "object" else f"[{', '.join(parts)}]"


def _operator_text(identity: Identity) -> str:
    if identity["operator"] == "branch":
        return f"branch({identity['name']!r})"
    at = identity.get("event_time")
    timed = f", event_time={at!r}" if at else ""
    return f"{identity['operator']}({identity_text(identity['function'])}{timed}): {fields_text(identity['fields'])}"


def _step_text(step: Identity) -> str:
    """Return a step of a pattern as the call that adds it; the first one as the arguments of `Pattern`."""
    within = f", within={identity_text(step['within'])}" if "within" in step else ""
    text = f"({step['name']!r}, {identity_text(step['condition'])}{within})"
    if within:
        text = ("then_not" if step.get("absent") else "then") + text
    return text + "".join(f".unless({name!r}, {identity_text(own)})" for name, own in step.get("without", ()))


def _given(parameters: Mapping[str, Any]) -> str:
    """Return parameters of user code as keyword arguments; their names do not imply a type."""
    return ", ".join(f"{name}={identity_text(value)}" for name, value in sorted(parameters.items()))


def _keywords(parameters: Mapping[str, Any]) -> str:
    written = {parameter_name(name): parameter_text(name, value) for name, value in parameters.items()}
    return ", ".join(f"{name}={text}" for name, text in sorted(written.items()))


def _value_text(value: Mapping[str, Any]) -> str:
    """Return a described value that is no JSON value as code, and the result of a user's `identity()` as JSON."""
    if "function" in value:
        return _function_text(value)
    kind: str
    inside: Any
    kind, inside = next(iter(value.items())) if len(value) == 1 else ("", value)
    if kind == "us":
        return duration_text(inside)
    if kind == "dict":
        return f"{{{', '.join(f'{identity_text(k)}: {identity_text(v)}' for k, v in inside)}}}"
    if kind == "set":
        return f"{{{', '.join(map(identity_text, inside))}}}"
    if kind == "tuple":
        return f"({', '.join(map(identity_text, inside))}{',' * (len(inside) == 1)})"
    if kind == "json":
        return str(inside)
    if kind in ("int", "float", "uuid", "bytes", "decimal", "datetime", "date", "time"):
        return str(inside) if kind in ("int", "float") else f"{kind}({inside!r})"
    return canonical_json(value).decode()


def _function_text(value: Mapping[str, Any]) -> str:
    inner, keywords = value["function"], _given(value.get("keywords", {}))
    if not isinstance(inner, str):
        given = [identity_text(inner), *map(identity_text, value.get("arguments", ())), keywords]
        return f"partial({', '.join(filter(None, given))})"
    return f"{inner}({keywords})" if "keywords" in value else inner

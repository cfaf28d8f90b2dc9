"""Bounds that the pages state are those of the code: a change of one shows which sentence names it."""

from __future__ import annotations

import pytest

from millpy import HttpBounds, KafkaTopic, Webhook
from millpy.admin import audits, pages, tokens
from millpy.api import database as api_database
from millpy.api import failures as api_failures
from millpy.api import limits as api_limits
from millpy.api import live, parameters, switching
from millpy.api import server as api_server
from millpy.formats import avro, binary_values, csv_rows, gzipped, json_objects, message, protobuf, sparkplug
from millpy.ingest import device_stats, expansion
from millpy.limits import KEY_BYTES_MAX, KEY_INTERVALS_MAX
from millpy.model.lookup import REFRESH_MIN
from millpy.observability import http as health_http
from millpy.operators import gap_filling, pattern_matching, silence, sparkplug_values
from millpy.operators import sparkplug as sparkplug_sessions
from millpy.process import launcher, supervisor
from millpy.sinks import statement
from millpy.sinks.mqtt import template
from millpy.sinks.mqtt import topic as mqtt_topic
from millpy.sinks.webhook import answers, connection, delivery, examination, requests
from millpy.sources.files import byte_reader
from millpy.sources.http import answers as http_answers
from millpy.sources.http import body, connections, endpoint, injector, rates
from millpy.sources.kafka import batch_columns, beginning
from millpy.sources.kafka import expansion as kafka_expansion
from millpy.sources.mqtt import silence as broker_silence
from millpy.sources.mqtt import source as mqtt_source
from millpy.sources.postgres import injected, polled_position
from millpy.spark import device_analytics, differing_rows
from millpy.spark.stream import BUNDLES_MAX
from millpy.ui import downloads, views
from millpy.windowing import calendar_windows, composite_triggers, window
from millpy.windowing.aggregates import positional, quantile, ranking
from tests.docs.blocks import ROOT

HTTP = HttpBounds()
STATED = {
    "api-server.md": [
        f"`limit` is at most {parameters.LIMIT_MAX:,}",
        f"a page ends early at {pages.BYTES_MAX // 10**6} MB",
        f"gets the newest {live.EVENTS_MAX} since then",
        f"While more than {live.CROWD} viewers",
        f"A token has at most {tokens.SESSIONS_MAX} sessions",
        f"| switches that wait | {switching.SWITCHES_MAX};",
        f"SIGTERM ends one that waits, after {api_server.STOP_S_MAX} s",
        f"a transaction that waits for the API | {api_database.STATEMENT_S_MAX:g} s;",
        f"| {api_database.WAITING_MAX} for each kind;",
        f"| {api_limits.BODY_BYTES_MAX // 10**6} MB, none for GET and HEAD; {api_limits.BODIES_BYTES_MAX // 10**6} MB;",
        f"{api_limits.BODY_S_MAX:g} s to send one",
        f"| {api_server.CONNECTIONS_MAX:,}, or fewer if the limit of open files is lower (`ulimit -n`);"
        f" {live.VIEWERS_MAX:,} |",
        f"| {live.BUFFER_BYTES_MAX // 10**6} MB, then the stream ends |",
        f"| {api_failures.FAILURES_MAX} a minute for an address (an IPv6 network of 64 bits), of the last"
        f" {api_failures.ADDRESSES_MAX:,} addresses;",
        f"| tokens | {tokens.TOKENS_MAX:,};",
    ],
    "bad-input.md": [
        f"more than {KEY_BYTES_MAX:,} bytes as JSON",
        f"At most {device_stats.DEVICES_MAX:,} devices a source partition",
    ],
    "files.md": [f"its first and last {byte_reader.HEAD_BYTES:,} bytes"],
    "http.md": [
        f"(the first {http_answers.SHOWN_RECORDS_MAX}; the others are counted)",
        f"with 1 to {body.KEY_CHARACTERS_MAX} printable ASCII characters",
        f"is read, up to {gzipped.EXPANDED_BYTES_MAX // 10**6} MB after decompression",
        f"`HttpBounds(body_bytes={HTTP.body_bytes:_})`",
        f"| `waiting_bytes={HTTP.waiting_bytes:_}`;",
        f"| `waiting_requests={HTTP.waiting_requests:_}` |",
        f"| `answer_s={HTTP.answer_s}` |",
        f"{rates.CLIENTS_MAX:,} clients are remembered",
        f"the time for a head, and of an idle connection | {connections.IDLE_S:g} s",
        f"the time for a body | {endpoint.BODY_S_MAX:g} s | 408",
        f"| {connections.CONNECTIONS_MAX:,}, and {connections.SPARE_FILES} fewer than its open files",
        f"| {connections.LINGER_S:g} s; of a malformed or too long head, and of a malformed body,"
        f" {connections.LINGER_BYTES_MAX // 10**6} MB |",
        f"| a TLS handshake | {connections.HANDSHAKE_S:g} s |",
        f"had sent none away for {injector.REFUSED_LATELY_S:g} s",
    ],
    "kafka.md": [
        f"expand to more than {kafka_expansion.EXPANDED_BYTES_MAX // 10**6} MB",
        f"has more than {kafka_expansion.HEADERS_BYTES_MAX // 1000} kB of headers",
        f"A batch of {batch_columns.BATCH_RECORDS_MIN} records or more",
        f"more than {beginning.PARTITIONS_MAX:,} partitions",
    ],
    "lookups.md": [f"`refresh=` ({REFRESH_MIN.total_seconds():g} s or more)"],
    "mqtt.md": [
        f"every {broker_silence.WATCH_EVERY_S:g} s whether it is there. After {broker_silence.SILENT_AFTER_S:g} s",
        f"after {broker_silence.HANG_UP_AFTER_S:g} s the connection is given up",
        f"at most {mqtt_source.RECEIVE_MAX:,} messages ahead",
    ],
    "operations.md": [
        f"serves at most {health_http.CONNECTIONS_MAX} connections",
        f"After {supervisor.RESTARTS_MAX} restarts of one worker in a row",
        f"started again after {supervisor.BACKOFF_S:g} s, then 2 s, 4 s and so on up to {supervisor.BACKOFF_S_MAX:g} s",
        f"not done {supervisor.STOP_MARGIN_S:g} s after `MILLPY_DRAIN_GRACE_S`",
        f"how many key intervals a step has (`intervals=`): at most {KEY_INTERVALS_MAX:,}",
        f"| 100 (`partials_max`, at most {pattern_matching.PARTIALS_MAX:,}) and"
        f" {pattern_matching.PARTIALS_BYTES_MAX:,} bytes; {gap_filling.POINTS_MAX:,}; {gap_filling.SEGMENTS_MAX:,} |",
        f"| {ranking.KEPT_MAX:,} of a window *a part* |",
        f"| devices of `millpy.fleet` | {device_stats.DEVICES_MAX:,} a source partition |",
    ],
    "page.md": [f"at most {views.ROWS_MAX} rows on a screen", f"the newest {downloads.ROWS_MAX:,} rows"],
    "payloads.md": [
        f"| {csv_rows.HEADER_CHARACTERS_MAX:,} bytes of the header of a file",
        f"| {json_objects.ENVELOPES_MAX:,} envelopes",
        f"| {message.NESTING_MAX} levels, or {binary_values.VALUES_MAX:,} values, in MessagePack and CBOR",
        f"| {binary_values.SHARED_MAX} times its own size in CBOR",
        f"| {avro.AVRO_BYTES_MAX:,} bytes in Avro and Protobuf; {protobuf.KEYED_BYTES_MAX:,} in Protobuf",
        f"| {protobuf.FIELDS_MAX:,} fields in Protobuf",
        f"| {binary_values.NUMBER_BYTES_MAX} bytes of a decimal in Avro",
        f"at most {expansion.EXPANDED_RECORDS_MAX:,} records of expanded messages",
        f"| {sparkplug.PAYLOAD_BYTES_MAX:,} bytes of a payload, {sparkplug.METRICS_MAX:,} metrics of a message,"
        f" {sparkplug.NAME_BYTES_MAX:,} bytes of a name |",
        f"| {sparkplug_sessions.DEFINITIONS_MAX:,} metrics and {sparkplug_sessions.DEVICES_MAX:,} devices",
        f"| {sparkplug_values.PARTS_MAX:,} values of an array or DataSet,"
        f" {sparkplug_values.TEXT_BYTES_MAX // 10**6} MB of text",
    ],
    "per-key.md": [
        f"{pattern_matching.PARTIALS_DEFAULT} by default and at most {pattern_matching.PARTIALS_MAX:,}",
        f"which may be at most {gap_filling.POINTS_MAX:,}",
        f"emits {gap_filling.POINTS_AT_ONCE} points at once",
        f"of {gap_filling.POINTS_A_CALL} points each",
        f"At most {gap_filling.SEGMENTS_MAX:,} gaps",
        f"keeps its {ranking.KEPT_MAX:,} best entries",
        f"A list has at most {silence.DEVICES_MAX:,} devices",
    ],
    "postgres.md": [
        f"from `waiting_max` records on, {injected.WAITING_MAX:,} by default",
        f"is seen if fewer than {polled_position.KEYS_MAX:,} rows",
    ],
    "sinks.md": [
        f"At most {statement.PARAMETERS_MAX:,} places and {statement.STATEMENT_CHARACTERS_MAX:,} characters",
        f"`transaction_timeout_s` ({KafkaTopic('t').transaction_timeout_s:g} s)",
        f"more than {template.TOPIC_BYTES_MAX:,} bytes or more than {template.LEVELS_MAX} levels",
        f"`bound=SendBound(records={mqtt_topic.SEND_MAX.records})`",
        f"all of a `send`, at most {mqtt_topic.ON_WAY_MAX:,}",
        f"more than {mqtt_topic.PROPERTY_BYTES_MAX:,} bytes",
        f"| {', '.join(map(str, sorted(answers.AGAIN)))}, 5xx, no answer in",
        f"| {', '.join(map(str, sorted(answers.FINAL)))}: its content is refused |",
        f"up to `in_flight` ({Webhook('https://example.org').in_flight})",
        f"Of an answer {connection.ANSWER_BYTES_MAX:,} bytes are read",
        f"the first {connection.REASON_CHARACTERS_MAX} characters that the receiver has answered",
        f"its headers of fields {requests.HEADERS_BYTES_MAX:,} bytes",
        f"a certificate that ends within {examination.LONG_DAYS} days",
    ],
    "spark.md": [
        f"It changes up to {differing_rows.ROWS_MAX:,} rows",
        f"Each audit covers up to {audits.HOURS_OF_AN_AUDIT} hours",
        f"up to {audits.EXAMPLES_MAX} differences ({audits.EXAMPLES_BYTES_MAX // 1024} kB)",
        f"for {audits.KEPT_FOR}",
    ],
    "spark-stream.md": [f"those beyond {device_analytics.VALUE_MAX:g}".replace("e+", "e")],
    "spark-streaming.md": [f"in at most {BUNDLES_MAX} bundles"],
    "windows.md": [
        f"windows (at most {window.WINDOWS_PER_RECORD_MAX:,})",
        f"composed of at most {composite_triggers.TRIGGERS_MAX} triggers",
        f"of which {calendar_windows.CHUNKS_MAX:,} stay in memory",
        f"n values, at most {positional.N_MAX:,}",
        f"at most {positional.COLLECT_LIMIT_MAX:,} values and {positional.COLLECT_BYTES_MAX:,} bytes of text",
        f"at most {quantile.BUCKETS_MAX:,} buckets",
    ],
}
WORDS = {
    ("sinks.md", "it failed five times (with 425, 429 or 503 thirty times)"): (
        delivery.ATTEMPTS_MAX, delivery.BUSY_ATTEMPTS_MAX, sorted(answers.BUSY),
    ) == (5, 30, [425, 429, 503]),
    ("sinks.md", "for at most five minutes"): answers.RETRY_AFTER_S_MAX == 300,
    ("mistakes.md", "give a number from 1 to 64"): launcher.WORKERS_MAX == 64,
}  # fmt: skip
"""Sentences that write numbers as words, and whether they are true."""


def text_of(page: str) -> str:
    return " ".join((ROOT / "docs" / page).read_text().split())


@pytest.mark.parametrize("page", STATED)
def test_bounds_on_the_page_are_those_of_the_code(page: str) -> None:
    text = text_of(page)

    assert [stated for stated in STATED[page] if stated not in text] == []


@pytest.mark.parametrize(("page", "sentence"), WORDS)
def test_sentence_is_true(page: str, sentence: str) -> None:
    assert sentence in text_of(page)
    assert WORDS[page, sentence]

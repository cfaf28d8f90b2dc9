-- The outboxes of sinks: appended in the fenced commit, read and emptied by the interval's owner.

-- name: append_outbox
-- Raises MW006 unless the messages of each interval follow those that it has stored or delivered. Always one row.
WITH sent AS (
    SELECT * FROM unnest(%(intervals)s, %(bundles)s, %(heads)s, %(counts)s, %(digests)s, %(payloads)s)
        AS e (interval_id, bundle, position, records, checksum, payload)
), found AS (
    SELECT s.position, coalesce(
               (SELECT o.position + o.records FROM mill.outbox AS o WHERE o.interval_id = s.interval_id
                 ORDER BY o.position DESC LIMIT 1),
               (SELECT d.delivered FROM mill.deliveries AS d WHERE d.interval_id = s.interval_id), 0) AS head
      FROM sent AS s
), added AS (
    INSERT INTO mill.outbox (interval_id, position, records, bundle, checksum, payload)
    SELECT interval_id, position, records, bundle, checksum, payload FROM sent
)
SELECT mill.check_outbox(count(*) FILTER (WHERE head <> position)) FROM found;

-- name: hold_outbox
-- Refuses reports of earlier owners from now on, and waits for those in flight: also for one that is the first, which an
-- UPDATE would not see. Always one row.
INSERT INTO mill.deliveries AS d (interval_id, delivered, sequencer, connected, since, why, attempts)
VALUES (%(interval)s, 0, %(sequencer)s, true, clock_timestamp(), '', 0)
    ON CONFLICT (interval_id) DO UPDATE SET sequencer = greatest(d.sequencer, excluded.sequencer)
RETURNING 1;

-- name: read_outbox_state
-- Reads (position of the next message, position behind the delivered ones, bytes) of an interval. Always one row.
SELECT greatest(max(o.position + o.records), max(d.delivered), 0), coalesce(max(d.delivered), 0),
       coalesce(sum(octet_length(o.payload)), 0)::bigint
  FROM (SELECT %(interval)s::bigint AS interval_id) AS i
  LEFT JOIN mill.deliveries AS d USING (interval_id)
  LEFT JOIN mill.outbox AS o USING (interval_id);

-- name: read_refused
-- Reads the messages of an interval that are refused, or wait behind one, in order. Zero rows: there are none.
SELECT position, checksum, payload, key, record, attempts, mill.instant(since), why, parked
  FROM mill.refused_messages WHERE interval_id = %(interval)s ORDER BY position;

-- name: read_outbox
-- Reads the row that holds a position, and those after it, at most 1,000 of about some bytes. Zero rows: there is none.
SELECT n.position, n.records, n.checksum, n.payload
  FROM (SELECT b.*, sum(octet_length(b.payload)) OVER (ORDER BY b.position) - octet_length(b.payload) AS before
          FROM (SELECT o.position, o.records, o.checksum, o.payload FROM mill.outbox AS o
                 WHERE o.interval_id = %(interval)s AND o.position + o.records > %(position)s
                   AND o.position >= coalesce((SELECT max(l.position) FROM mill.outbox AS l
                                                WHERE l.interval_id = %(interval)s AND l.position <= %(position)s), 0)
                 ORDER BY o.position LIMIT 1000) AS b) AS n
 WHERE n.before < %(bytes_max)s ORDER BY n.position;

-- name: record_delivered
-- Stores how far outboxes are delivered and what is refused, deletes the rows that are settled, and returns the
-- intervals whose grants are current. Zero rows: none is.
WITH sent AS (
    SELECT * FROM unnest(%(intervals)s, %(sequencers)s, %(heads)s, %(connected)s::boolean[], %(since)s::bigint[], %(reasons)s,
                         %(attempts)s)
        AS e (interval_id, sequencer, delivered, connected, since, why, attempts)
), held AS (
    SELECT s.* FROM sent AS s JOIN mill.intervals AS i ON i.interval_id = s.interval_id AND i.sequencer = s.sequencer
), stored AS (
    INSERT INTO mill.deliveries AS d (interval_id, delivered, delivered_at, sequencer, connected, since, why, attempts)
    SELECT interval_id, delivered, clock_timestamp(), sequencer, connected, mill.moment(since), why, attempts FROM held
    ON CONFLICT (interval_id) DO UPDATE
       SET delivered = greatest(d.delivered, excluded.delivered),
           delivered_at = CASE WHEN excluded.delivered > d.delivered THEN excluded.delivered_at ELSE d.delivered_at END,
           sequencer = excluded.sequencer, connected = excluded.connected, why = excluded.why, attempts = excluded.attempts,
           since = CASE WHEN d.connected OR excluded.connected THEN excluded.since ELSE least(d.since, excluded.since) END
     WHERE d.sequencer <= excluded.sequencer  -- a later owner has read the outbox: what it has read must stay
    RETURNING interval_id, delivered
), gone AS (
    DELETE FROM mill.outbox AS o USING stored AS h
     WHERE o.interval_id = h.interval_id AND o.position < h.delivered AND o.position + o.records <= h.delivered
), refused AS (
    INSERT INTO mill.refused_messages AS r (interval_id, position, key, attempts, since, why, parked, record, checksum, payload)
    SELECT e.interval_id, e.position, e.key, e.attempts, mill.moment(e.since), e.why, e.parked, e.record, e.checksum, e.payload
      FROM unnest(%(refused_in)s, %(positions)s, %(keys)s, %(tries)s, %(refused_since)s::bigint[], %(whys)s, %(parked)s::boolean[],
                  %(records)s, %(checksums)s, %(payloads)s)
        AS e (interval_id, position, key, attempts, since, why, parked, record, checksum, payload)
      JOIN stored USING (interval_id)
    ON CONFLICT (interval_id, position) DO UPDATE
       SET attempts = excluded.attempts, since = excluded.since, why = excluded.why, parked = excluded.parked
), accepted AS (
    DELETE FROM mill.refused_messages AS r USING stored AS h, unnest(%(accepted_in)s, %(accepted)s) AS e (interval_id, position)
     WHERE r.interval_id = h.interval_id AND r.interval_id = e.interval_id AND r.position = e.position
)
SELECT interval_id FROM stored;

-- name: settle_refused
-- Deletes messages that become dead letters in this commit. Raises MW007 when one is gone. Always one row.
WITH gone AS (
    DELETE FROM mill.refused_messages AS r USING unnest(%(intervals)s, %(positions)s) AS e (interval_id, position)
     WHERE r.interval_id = e.interval_id AND r.position = e.position RETURNING 1
)
SELECT mill.check_settled((SELECT count(*) FROM gone), cardinality(%(positions)s));

-- name: release_refused
-- Lets parked keys be sent again. Zero rows: none was parked.
UPDATE mill.refused_messages AS r SET parked = false, attempts = 0, why = ''
  FROM unnest(%(intervals)s, %(keys)s) AS e (interval_id, key)
 WHERE r.interval_id = e.interval_id AND r.key = e.key AND r.parked;

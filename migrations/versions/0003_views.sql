-- What people read. Exact and live: folded rows overlaid by the documents that are not folded yet, in one snapshot.
-- A reader has no rights in schema mill: views read it with their owner's rights, and functions that read are
-- SECURITY DEFINER. Functions that write have the rights of their caller.
CREATE SCHEMA millpy;

CREATE VIEW millpy.graphs AS
SELECT name AS graph, family, generation, name = family AS current, version, deployed_at FROM mill.graphs;

-- What the status views of result tables need. They have their caller's rights, so that row-level security holds
-- there too; this they may all see.
CREATE VIEW millpy.input_watermarks AS SELECT interval_id, input_watermark FROM mill.intervals;
GRANT SELECT ON millpy.input_watermarks TO PUBLIC;

-- Changes that are not folded yet.
CREATE VIEW mill.changes AS
SELECT d.interval_id, d.bundle, e.kind, e.namespace, c.key::text AS key, c.subkey,
       c.fire_at::bigint AS fire_at, nullif(c.value::text, 'null')::json AS value  -- a tombstone is null
  FROM mill.intervals AS i
  JOIN mill.deltas AS d ON d.interval_id = i.interval_id AND d.bundle > i.folded_bundle
 CROSS JOIN LATERAL json_to_recordset(d.document) AS e
       (kind text, namespace text, key json, subkey json, value json, fire_at json)
 CROSS JOIN LATERAL ROWS FROM (json_array_elements(e.key), json_array_elements_text(e.subkey),
       json_array_elements(e.value), json_array_elements_text(e.fire_at)) AS c (key, subkey, value, fire_at);

-- Every keyed thing as it is now.
CREATE VIEW mill.entries AS
SELECT interval_id, kind, namespace, key, subkey, fire_at, value
  FROM (SELECT DISTINCT ON (interval_id, kind, namespace, key, subkey) *
          FROM (SELECT interval_id, kind, namespace, key, subkey, fire_at, bundle, value::json AS value FROM mill.keyed
                 UNION ALL
                SELECT interval_id, kind, namespace, key, subkey, fire_at, bundle, value -> 0 FROM mill.changes) AS stored
         ORDER BY interval_id, kind, namespace, key, subkey, bundle DESC) AS newest
 WHERE value IS NOT NULL;

-- An interval with the words for it.
CREATE VIEW mill.places AS
SELECT g.name AS graph, c.name AS computation, c.kind, i.*,
       CASE WHEN c.kind = 'injector' THEN 'source partition ' || i.source_partition
            ELSE format('keys %s to %s', lpad(to_hex(i.key_lo), 8, '0'), lpad(to_hex(i.key_hi - 1), 8, '0'))
       END AS described
  FROM mill.intervals AS i
  JOIN mill.computations AS c USING (computation_id)
  JOIN mill.graphs AS g ON g.graph_id = i.graph_id;

CREATE VIEW millpy.state AS
SELECT p.graph, p.computation, e.namespace AS cell, e.key, e.subkey, e.value::jsonb AS value, p.interval_id
  FROM mill.entries AS e JOIN mill.places AS p USING (interval_id)
 WHERE e.kind = 'state';

CREATE VIEW millpy.timers AS
SELECT p.graph, p.computation, e.namespace AS time_domain, e.key, e.subkey AS timer, mill.moment(e.fire_at) AS fires_at,
       e.value::jsonb AS value, p.interval_id
  FROM mill.entries AS e JOIN mill.places AS p USING (interval_id)
 WHERE e.kind = 'timer';

CREATE VIEW millpy.windows AS
SELECT p.graph, p.computation, e.key, mill.moment(split_part(e.subkey, '/', 1)::bigint) AS window_start,
       mill.moment(split_part(e.subkey, '/', 2)::bigint) AS window_end, mill.moment(e.fire_at) AS expires_at,
       e.value::jsonb AS value, p.interval_id
  FROM mill.entries AS e JOIN mill.places AS p USING (interval_id)
 WHERE e.kind = 'window';

-- Stored records and bytes above the cursors, by subscription: counted, not subtracted.
CREATE VIEW mill.pending AS
SELECT u.subscription_id, coalesce(sum(found.segments), 0)::bigint AS segments,
       coalesce(sum(found.records), 0)::bigint AS records, coalesce(sum(found.bytes), 0)::bigint AS bytes
  FROM mill.subscriptions AS u
  JOIN mill.streams AS s USING (stream_id)
  JOIN mill.intervals AS p ON p.computation_id = s.producer_id
  JOIN mill.intervals AS c ON c.computation_id = u.consumer_id
  JOIN mill.cursors AS k ON k.consumer = c.interval_id AND k.producer = p.interval_id
  LEFT JOIN LATERAL (
       SELECT count(*) AS segments, sum(g.records[c.place + 1]) AS records,
              sum(g.ends[c.place + 1] - coalesce(g.ends[c.place], 0)) AS bytes
         FROM mill.segments AS g
        WHERE k.seq < p.bundle AND g.subscription_id = u.subscription_id AND g.producer = p.interval_id AND g.seq > k.seq
       ) AS found ON true
 GROUP BY u.subscription_id;

CREATE VIEW millpy.backlog AS
SELECT g.name AS graph, s.name AS stream, c.name AS consumer, u.key_fields, p.segments, p.records, p.bytes
  FROM mill.pending AS p
  JOIN mill.subscriptions AS u USING (subscription_id)
  JOIN mill.streams AS s USING (stream_id)
  JOIN mill.computations AS c ON c.computation_id = u.consumer_id
  JOIN mill.graphs AS g ON g.graph_id = u.graph_id;

-- I8. Both sides of each comparison are counted by themselves, where it happens; none is what another leaves over.
--   a source partition   injected = accepted + duplicate + dead_lettered
--                        (by the source before decoding; by the intake behind it)
--   a subscription       produced + added = filtered + consumed + late + quarantined + parked + pending
--                        (where records come into being, operators for `added` and `filtered`; where they reach a step's
--                        state; parked and pending: as stored). `duplicate` of those consumed were dropped by a deduplicate step.
--   a result table       produced = consumed: rows that came into being, and rows that were given to the table
-- Counts that do not apply are null; so are `parked`, `filtered` and `added` while there are none.
-- A function, because the planner takes the functions over documents for expensive and would compile the query (JIT)
-- for longer than it runs. VOLATILE, so that its snapshot is taken after its locks: a slot of a ring is emptied by
-- TRUNCATE, which older snapshots see too, and what was folded or consumed between would be missing on both sides.
CREATE FUNCTION mill.account()
RETURNS TABLE (graph text, stream text, source_partition text, consumer text, key_fields text[], result_table text,
               injected bigint, accepted bigint, duplicate bigint, dead_lettered bigint, produced bigint, added bigint,
               filtered bigint, consumed bigint, late bigint, quarantined bigint, parked bigint, pending bigint, balanced boolean)
LANGUAGE sql VOLATILE ROWS 20 SET jit = off
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
WITH counters AS MATERIALIZED (
    SELECT interval_id, namespace, subkey, (value #>> '{}')::bigint AS count FROM mill.entries WHERE kind = 'counter'
), parked AS (
    SELECT namespace AS subscription, count(*) AS count FROM mill.entries WHERE kind = 'parked' GROUP BY namespace
), sources AS (
    SELECT p.graph, s.name AS stream, p.source_partition,
           coalesce(sum(k.count) FILTER (WHERE k.namespace = 'injected'), 0)::bigint AS injected,
           coalesce(sum(k.count) FILTER (WHERE k.namespace = 'accepted'), 0)::bigint AS accepted,
           coalesce(sum(k.count) FILTER (WHERE k.namespace = 'duplicate'), 0)::bigint AS duplicate,
           coalesce(sum(k.count) FILTER (WHERE k.namespace = 'dead_lettered'), 0)::bigint AS dead_lettered
      FROM mill.places AS p
      JOIN mill.streams AS s ON s.producer_id = p.computation_id
      LEFT JOIN counters AS k ON k.interval_id = p.interval_id AND k.subkey = s.name
     WHERE p.kind = 'injector'
     GROUP BY p.graph, s.name, p.interval_id, p.source_partition
), subscribed AS (
    SELECT g.name AS graph, s.name AS stream, c.name AS consumer, u.key_fields,
           sum(k.count) FILTER (WHERE k.namespace = 'duplicate')::bigint AS duplicate,
           coalesce(sum(k.count) FILTER (WHERE k.namespace = 'produced'), 0)::bigint AS produced,
           sum(k.count) FILTER (WHERE k.namespace = 'added')::bigint AS added,
           sum(k.count) FILTER (WHERE k.namespace = 'filtered')::bigint AS filtered,
           coalesce(sum(k.count) FILTER (WHERE k.namespace = 'consumed'), 0)::bigint AS consumed,
           coalesce(sum(k.count) FILTER (WHERE k.namespace = 'late'), 0)::bigint AS late,
           coalesce(sum(k.count) FILTER (WHERE k.namespace = 'quarantined'), 0)::bigint AS quarantined,
           (SELECT q.count FROM parked AS q WHERE q.subscription = u.subscription_id::text) AS parked,
           (SELECT w.records FROM mill.pending AS w WHERE w.subscription_id = u.subscription_id) AS pending
      FROM mill.subscriptions AS u
      JOIN mill.streams AS s USING (stream_id)
      JOIN mill.computations AS c ON c.computation_id = u.consumer_id
      JOIN mill.graphs AS g ON g.graph_id = u.graph_id
      LEFT JOIN counters AS k
        ON k.subkey = u.subscription_id::text
       AND k.namespace IN ('produced', 'added', 'filtered', 'consumed', 'late', 'quarantined', 'duplicate')
     GROUP BY g.name, s.name, c.name, u.subscription_id
), tables AS (
    SELECT g.name AS graph, s.name AS stream, t.name AS result_table,
           coalesce(sum(k.count) FILTER (WHERE k.namespace = 'emitted'), 0)::bigint AS produced,
           coalesce(sum(k.count) FILTER (WHERE k.namespace = 'written'), 0)::bigint AS consumed
      FROM mill.result_tables AS t
      JOIN mill.streams AS s USING (stream_id)
      JOIN mill.graphs AS g ON g.graph_id = t.graph_id
      LEFT JOIN counters AS k ON k.subkey = t.table_id::text AND k.namespace IN ('emitted', 'written')
     GROUP BY g.name, s.name, t.table_id
)
SELECT graph, stream, source_partition, NULL::text AS consumer, NULL::text[] AS key_fields, NULL::text AS result_table,
       injected, accepted, duplicate, dead_lettered, NULL::bigint AS produced, NULL::bigint AS added,
       NULL::bigint AS filtered, NULL::bigint AS consumed, NULL::bigint AS late, NULL::bigint AS quarantined,
       NULL::bigint AS parked, NULL::bigint AS pending, injected = accepted + duplicate + dead_lettered AS balanced
  FROM sources
 UNION ALL
SELECT graph, stream, NULL, consumer, key_fields, NULL, NULL, NULL, duplicate, NULL, produced, added, filtered, consumed, late,
       quarantined, parked, pending,
       produced + coalesce(added, 0) = coalesce(filtered, 0) + consumed + late + quarantined + coalesce(parked, 0) + pending
  FROM subscribed
 UNION ALL
SELECT graph, stream, NULL, NULL, NULL, result_table, NULL, NULL, NULL, NULL, produced, NULL, NULL, consumed, NULL, NULL, NULL,
       NULL, produced = consumed
  FROM tables
$$;

CREATE VIEW millpy.accounting AS SELECT * FROM mill.account();

-- `infinity` is the end of the input, `-infinity` its beginning. lag: how far behind the clock.
CREATE VIEW millpy.watermarks AS
SELECT p.graph, p.computation, p.interval_id, p.described AS part, p.worker_id,
       coalesce(w.lease_deadline > clock_timestamp(), false) AS live, p.bundle,
       mill.moment(p.input_watermark) AS input_watermark, mill.moment(p.low_watermark) AS low_watermark,
       mill.moment(p.oldest_work) AS oldest_work,
       CASE WHEN abs(p.low_watermark) < 4611686018427387904 THEN clock_timestamp() - mill.moment(p.low_watermark) END AS lag
  FROM mill.places AS p
  JOIN mill.computations AS c USING (computation_id)
  LEFT JOIN mill.workers AS w USING (worker_id)
 ORDER BY p.graph, c.place, p.place;

CREATE VIEW millpy.workers AS
SELECT g.name AS graph, w.worker_id, w.host, w.pid, w.lease_deadline > clock_timestamp() AS live, w.registered_at,
       w.lease_deadline, w.computations,
       (SELECT count(*) FROM mill.intervals AS i WHERE i.worker_id = w.worker_id) AS intervals,
       w.graph_version AS version
  FROM mill.workers AS w JOIN mill.graphs AS g USING (graph_id)
 ORDER BY g.name, w.registered_at;

CREATE VIEW millpy.result_tables AS
SELECT g.name AS graph, t.name, t.kind, c.name AS computation, t.key_columns, t.value_columns,
       t.allowed_lateness_us * interval '1 microsecond' AS allowed_lateness
  FROM mill.result_tables AS t
  JOIN mill.computations AS c USING (computation_id)
  JOIN mill.graphs AS g ON g.graph_id = t.graph_id;

CREATE VIEW millpy.events AS
SELECT g.name AS graph, e.at, e.kind, e.detail FROM mill.events AS e JOIN mill.graphs AS g USING (graph_id);

-- The watermark of an interval's keyed thing that holds it back: the oldest window, timer, hold or parked record.
CREATE FUNCTION mill.oldest_entry(p_interval bigint)
RETURNS TABLE (kind text, namespace text, key text, subkey text, at bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT e.kind, e.namespace, e.key, e.subkey, at
      FROM mill.entries AS e
     CROSS JOIN LATERAL (
           SELECT CASE WHEN e.kind = 'window' THEN split_part(e.subkey, '/', 2)::bigint - 1
                       WHEN e.kind = 'parked' OR e.namespace IN ('event', 'hold') THEN e.fire_at
                       -- A processing-time timer holds at the time of the record that set it.
                       ELSE coalesce((SELECT i.oldest_work FROM mill.intervals AS i WHERE i.interval_id = p_interval),
                                     e.fire_at)
                  END AS at) AS held
     WHERE e.interval_id = p_interval AND e.kind IN ('window', 'timer', 'parked')
       -- A window whose on-time pane is out holds nothing.
       AND NOT (e.kind = 'window' AND at < (SELECT i.oldest_work FROM mill.intervals AS i WHERE i.interval_id = p_interval))
     ORDER BY at, e.key, e.subkey LIMIT 1
$$;

-- Walks upstream from a computation to what holds its watermark: one row per step, the last one is the culprit.
-- held_for: how far its watermark is behind the clock.
CREATE FUNCTION millpy.explain_watermark(p_graph text, p_computation text)
RETURNS TABLE (step integer, computation text, part text, input_watermark timestamptz, low_watermark timestamptz,
               held_by text, detail text, held_for interval)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    here record;
    slowest record;
    entry record;
    next_interval bigint;
BEGIN
    SELECT p.interval_id INTO next_interval FROM mill.places AS p
     WHERE p.graph = p_graph AND p.computation = p_computation ORDER BY p.low_watermark, p.place LIMIT 1;
    IF next_interval IS NULL THEN
        RAISE EXCEPTION 'graph % has no computation %', p_graph, p_computation USING ERRCODE = 'no_data_found';
    END IF;
    step := 0;
    LOOP
        step := step + 1;
        SELECT p.*, coalesce(w.lease_deadline > clock_timestamp(), false) AS live INTO here
          FROM mill.places AS p LEFT JOIN mill.workers AS w USING (worker_id) WHERE p.interval_id = next_interval;
        computation := here.computation;
        part := here.described;
        input_watermark := mill.moment(here.input_watermark);
        low_watermark := mill.moment(here.low_watermark);
        held_for := CASE WHEN abs(here.low_watermark) < 4611686018427387904
                         THEN clock_timestamp() - mill.moment(here.low_watermark) END;
        SELECT k.producer, k.seq, k.watermark, i.bundle, i.low_watermark AS published INTO slowest
          FROM mill.cursors AS k JOIN mill.intervals AS i ON i.interval_id = k.producer
         WHERE k.consumer = next_interval ORDER BY k.watermark, i.low_watermark, k.producer LIMIT 1;
        IF here.low_watermark >= 4611686018427387904 THEN
            held_by := 'nothing';
            detail := 'everything has ended';
        ELSIF NOT here.live THEN
            held_by := 'owner';
            detail := 'no live worker owns this interval';
        ELSIF slowest.producer IS NOT NULL AND here.oldest_work < here.input_watermark THEN
            SELECT * INTO entry FROM mill.oldest_entry(next_interval);
            held_by := coalesce(CASE WHEN entry.kind = 'timer' AND entry.namespace = 'hold' THEN 'hold'
                                     ELSE entry.kind END, 'work');
            detail := CASE entry.kind
                WHEN 'window' THEN format('key %s, window %s to %s', entry.key, mill.moment(split_part(entry.subkey, '/', 1)::bigint),
                                          mill.moment(split_part(entry.subkey, '/', 2)::bigint))
                WHEN 'parked' THEN format('key %s stopped at a record that fails; its records wait from %s (millpy parked list)',
                                          entry.key, mill.moment(entry.at))
                WHEN 'timer' THEN format('key %s, %s %s at %s', entry.key, entry.namespace, entry.subkey, mill.moment(entry.at))
                ELSE format('oldest work at %s', mill.moment(here.oldest_work)) END;
        ELSIF slowest.producer IS NULL AND EXISTS (SELECT FROM mill.pauses AS s WHERE s.interval_id = next_interval) THEN
            held_by := 'pause';
            detail := (SELECT format('%s stands still since %s: %s', here.described, s.paused_at, s.reason)
                         FROM mill.pauses AS s WHERE s.interval_id = next_interval);
        ELSIF slowest.producer IS NULL THEN
            held_by := 'source';
            -- Its newest record says where its watermark stands; whose it is, and who is silent, is in millpy.fleet.
            detail := format('%s has brought nothing later than %s', here.described, mill.moment(here.low_watermark))
                || coalesce((SELECT format('; the newest record is from %s, see millpy.fleet', e.key)
                               FROM mill.entries AS e WHERE e.interval_id = next_interval AND e.kind = 'fleet'
                              ORDER BY (e.value ->> 2)::bigint DESC LIMIT 1), '');
        ELSIF slowest.published > slowest.watermark THEN
            held_by := 'backlog';
            detail := format('bundle %s of %s is consumed and %s is committed', slowest.seq,
                             (SELECT p.computation || ', ' || p.described FROM mill.places AS p WHERE p.interval_id = slowest.producer),
                             slowest.bundle);
        ELSE
            held_by := 'input';
            detail := (SELECT p.computation || ', ' || p.described FROM mill.places AS p WHERE p.interval_id = slowest.producer);
            next_interval := slowest.producer;
            RETURN NEXT;
            CONTINUE;
        END IF;
        RETURN NEXT;
        RETURN;
    END LOOP;
END $$;

-- The same for a computation whose name is in one graph only.
CREATE FUNCTION millpy.explain_watermark(p_computation text)
RETURNS TABLE (step integer, computation text, part text, input_watermark timestamptz, low_watermark timestamptz,
               held_by text, detail text, held_for interval)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    graphs text[];
BEGIN
    SELECT array_agg(DISTINCT p.graph ORDER BY p.graph) INTO graphs FROM mill.places AS p WHERE p.computation = p_computation;
    IF graphs IS NULL THEN
        RAISE EXCEPTION 'no graph has a computation %', p_computation USING ERRCODE = 'no_data_found';
    ELSIF cardinality(graphs) > 1 THEN
        RAISE EXCEPTION 'graphs % have a computation %', array_to_string(graphs, ', '), p_computation
              USING ERRCODE = 'ambiguous_alias', HINT = 'name the graph: millpy.explain_watermark(graph, computation)';
    END IF;
    RETURN QUERY SELECT * FROM millpy.explain_watermark(graphs[1], p_computation);
END $$;

-- Bytes as text; escaped when they are none.
CREATE FUNCTION mill.readable(p_bytes bytea) RETURNS text LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN convert_from(p_bytes, 'UTF8');
EXCEPTION WHEN character_not_in_repertoire THEN
    RETURN encode(p_bytes, 'escape');
END $$;

-- What was set aside, for people: payloads as received, and as text.
-- state: set_aside, requested (to be taken again), replayed, discarded; attempts: replays that ended here again.
CREATE VIEW millpy.dead_letters AS
SELECT g.name AS graph, d.computation, d.stream, d.reason, d.detail, d.source_position, d.key,
       mill.moment(d.event_time) AS event_time, mill.readable(d.payload) AS payload_text, d.payload, d.traceback,
       d.dead_lettered_at, d.dead_letter_id, d.state, d.state_at, d.attempts, d.corrected, d.stream <> '' AS replayable
  FROM mill.dead_letters AS d
  JOIN mill.intervals AS i USING (interval_id)
  JOIN mill.graphs AS g ON g.graph_id = i.graph_id;

CREATE VIEW millpy.late_records AS
SELECT g.name AS graph, l.computation, l.stream, l.key, mill.moment(l.event_time) AS event_time,
       mill.moment(l.watermark) AS watermark, mill.moment(l.window_start) AS window_start,
       mill.moment(l.window_end) AS window_end, mill.readable(l.payload) AS payload_text, l.payload, l.recorded_at,
       l.late_record_id, l.state, l.state_at, l.attempts, l.whole AS replayable
  FROM mill.late_records AS l
  JOIN mill.intervals AS i USING (interval_id)
  JOIN mill.graphs AS g ON g.graph_id = i.graph_id;

-- Of each cause, what was seen, what of it was kept (the rest is only counted), and what has been removed since by age.
CREATE VIEW millpy.set_aside AS
SELECT graph, pile, stream, computation, reason, sum(seen)::bigint AS seen, sum(kept)::bigint AS kept,
       sum(seen - kept)::bigint AS not_kept, sum(expired)::bigint AS expired
  FROM (SELECT g.name AS graph, e.namespace AS pile, c.cause ->> 0 AS stream, c.cause ->> 1 AS computation,
               c.cause ->> 2 AS reason, (e.value ->> 0)::bigint AS seen, (e.value ->> 1)::bigint AS kept, 0 AS expired
          FROM mill.entries AS e
          JOIN mill.intervals AS i USING (interval_id)
          JOIN mill.graphs AS g ON g.graph_id = i.graph_id
         CROSS JOIN LATERAL (SELECT e.subkey::json AS cause) AS c
         WHERE e.kind = 'set_aside'
         UNION ALL
        SELECT g.name, x.pile, x.stream, x.computation, x.reason, 0, 0, x.count
          FROM mill.expired AS x JOIN mill.graphs AS g USING (graph_id)) AS counted
 GROUP BY graph, pile, stream, computation, reason;

-- Asks for dead letters to be taken again; how many were waiting for it. The owner of the interval that set a record
-- aside takes it as it takes any other, in one transaction with marking it replayed, or set aside again. What is no
-- record (a timer, a result row) cannot be replayed.
CREATE FUNCTION millpy.replay_dead_letters(p_ids bigint[]) RETURNS bigint
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    WITH asked AS (
        UPDATE mill.dead_letters SET state = 'requested', state_at = now()
         WHERE dead_letter_id = ANY (p_ids) AND state = 'set_aside' AND stream <> ''
        RETURNING interval_id
    ), told AS (
        SELECT pg_notify('millpy_' || graph_id, 'replay')
          FROM (SELECT DISTINCT i.graph_id FROM asked JOIN mill.intervals AS i USING (interval_id)) AS graphs
    )
    SELECT count(*) FROM asked WHERE (SELECT count(*) FROM told) >= 0
$$;

-- The same for one, read from another payload; it keeps the dedupe id that it had.
CREATE FUNCTION millpy.replay_dead_letter(p_id bigint, p_payload bytea) RETURNS bigint
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE mill.dead_letters SET corrected = p_payload WHERE dead_letter_id = p_id AND state = 'set_aside' AND stream <> '';
    SELECT millpy.replay_dead_letters(ARRAY[p_id])
$$;

-- A record that is in another of its windows already is not taken again; of one that missed several windows, one row
-- stands for it.
CREATE FUNCTION millpy.replay_late_records(p_ids bigint[]) RETURNS bigint
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    WITH asked AS (
        UPDATE mill.late_records SET state = 'requested', state_at = now()
         WHERE late_record_id = ANY (p_ids) AND state = 'set_aside' AND whole
        RETURNING interval_id
    ), told AS (
        SELECT pg_notify('millpy_' || graph_id, 'replay')
          FROM (SELECT DISTINCT i.graph_id FROM asked JOIN mill.intervals AS i USING (interval_id)) AS graphs
    )
    SELECT count(*) FROM asked WHERE (SELECT count(*) FROM told) >= 0
$$;

-- Gives records up: they stay counted, and are removed after a while. What is being replayed right now is waited for.
CREATE FUNCTION millpy.discard_dead_letters(p_ids bigint[]) RETURNS bigint
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    WITH gone AS (
        UPDATE mill.dead_letters SET state = 'discarded', state_at = now()
         WHERE dead_letter_id = ANY (p_ids) AND state IN ('set_aside', 'requested')
        RETURNING 1
    )
    SELECT count(*) FROM gone
$$;

CREATE FUNCTION millpy.discard_late_records(p_ids bigint[]) RETURNS bigint
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    WITH gone AS (
        UPDATE mill.late_records SET state = 'discarded', state_at = now()
         WHERE late_record_id = ANY (p_ids) AND state IN ('set_aside', 'requested')
        RETURNING 1
    )
    SELECT count(*) FROM gone
$$;

-- Source partitions: what they have counted, and which stand still because too much was set aside.
CREATE VIEW millpy.sources AS
SELECT p.graph, p.computation AS stream, p.source_partition,
       CASE WHEN s.interval_id IS NOT NULL THEN 'paused'
            WHEN p.low_watermark >= 4611686018427387904 THEN 'ended'
            WHEN w.lease_deadline > clock_timestamp() THEN 'running' ELSE 'without a worker' END AS state,
       s.paused_at, s.reason AS paused_because, a.injected, a.accepted, a.duplicate, a.dead_lettered
  FROM mill.places AS p
  JOIN mill.account() AS a ON a.graph = p.graph AND a.stream = p.computation AND a.source_partition = p.source_partition
  LEFT JOIN mill.pauses AS s USING (interval_id)
  LEFT JOIN mill.workers AS w USING (worker_id)
 WHERE p.kind = 'injector';

-- Lets the partitions of a source that stand still go on; how many did.
CREATE FUNCTION millpy.resume_source(p_graph text, p_stream text) RETURNS bigint
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    WITH resumed AS (
        DELETE FROM mill.pauses AS s USING mill.places AS p
         WHERE p.interval_id = s.interval_id AND p.graph = p_graph AND p.computation = p_stream
        RETURNING p.graph_id
    ), noted AS (
        INSERT INTO mill.events (graph_id, kind, detail)
        SELECT graph_id, 'resumed', jsonb_build_object('stream', p_stream, 'partitions', count(*)) FROM resumed GROUP BY graph_id
    ), told AS (
        SELECT pg_notify('millpy_' || graph_id, 'resume') FROM (SELECT DISTINCT graph_id FROM resumed) AS graphs
    )
    SELECT count(*) FROM resumed WHERE (SELECT count(*) FROM told) >= 0
$$;

-- The devices of every source: when each was heard last, how far its clock or line is behind (lag), how often it sends
-- (records a second, over about the last minute), and what of it was dropped or set aside. Counts of the last second
-- may not be written yet. late and dead_letters are those of all computations with the same key, and what the source itself
-- set aside of records that it could read.
CREATE FUNCTION mill.devices()
RETURNS TABLE (graph text, stream text, source_partition text, device text, key text, last_event_time timestamptz,
               lag interval, silent_since timestamptz, silent_for interval, rate double precision, records bigint,
               duplicates bigint, late bigint, dead_letters bigint)
LANGUAGE sql VOLATILE ROWS 1000 SET jit = off  -- as mill.account()
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
WITH devices AS MATERIALIZED (
    SELECT p.graph_id, p.graph, p.computation AS stream, p.source_partition, string_to_array(e.namespace, ',') AS fields,
           e.key, e.value::jsonb AS value
      FROM mill.entries AS e JOIN mill.places AS p USING (interval_id)
     WHERE e.kind = 'fleet'
), keyed_alike AS (
    SELECT DISTINCT d.graph_id, d.stream, c.name AS computation
      FROM (SELECT DISTINCT graph_id, stream, fields FROM devices) AS d
      JOIN mill.streams AS s ON s.graph_id = d.graph_id AND s.name = d.stream
      JOIN mill.subscriptions AS u ON u.stream_id = s.stream_id AND u.key_fields = d.fields
      JOIN mill.computations AS c ON c.computation_id = u.consumer_id
), late AS (
    SELECT k.graph_id, k.stream, l.key, count(*) AS count
      FROM mill.late_records AS l
      JOIN mill.intervals AS i USING (interval_id)
      JOIN keyed_alike AS k ON k.graph_id = i.graph_id AND k.stream = l.stream AND k.computation = l.computation
     WHERE l.state <> 'replayed' AND l.whole
     GROUP BY k.graph_id, k.stream, l.key
), dead AS (
    SELECT i.graph_id, l.stream, l.key, count(*) AS count
      FROM mill.dead_letters AS l
      JOIN mill.intervals AS i USING (interval_id)
     WHERE l.key IS NOT NULL AND l.state <> 'replayed'
       AND (l.wire <> '' OR EXISTS (SELECT FROM keyed_alike AS k WHERE k.graph_id = i.graph_id AND k.stream = l.stream
                                                                  AND k.computation = l.computation))
     GROUP BY i.graph_id, l.stream, l.key
)
SELECT d.graph, d.stream, d.source_partition, d.key::jsonb #>> '{}', d.key, mill.moment((d.value ->> 2)::bigint),
       CASE WHEN (d.value ->> 2)::bigint > -4611686018427387904
            THEN mill.moment((d.value ->> 3)::bigint) - mill.moment((d.value ->> 2)::bigint) END,
       mill.moment((d.value ->> 3)::bigint), clock_timestamp() - mill.moment((d.value ->> 3)::bigint),
       -- Since it was last written the device has not been heard, or the last second is not written yet.
       (d.value ->> 4)::double precision
       * exp(-greatest(0, extract(epoch FROM clock_timestamp() - mill.moment((d.value ->> 5)::bigint)) - 1) / 60),
       (d.value ->> 0)::bigint, (d.value ->> 1)::bigint, coalesce(l.count, 0), coalesce(x.count, 0)
  FROM devices AS d
  LEFT JOIN late AS l ON (l.graph_id, l.stream, l.key) = (d.graph_id, d.stream, d.key)
  LEFT JOIN dead AS x ON (x.graph_id, x.stream, x.key) = (d.graph_id, d.stream, d.key)
$$;

CREATE VIEW millpy.fleet AS SELECT * FROM mill.devices();

-- Keys that stopped at a failing record or timer, and what waits behind it.
CREATE VIEW millpy.parked AS
SELECT p.graph, p.computation, w.key, w.records, mill.moment(w.holds_at) AS holds_watermark_at,
       mill.moment((f.value ->> 'parked_at')::bigint) AS parked_at, f.value ->> 'reason' AS reason,
       f.value ->> 'detail' AS detail, CASE WHEN f.value -> 'timer' ->> 1 IS NULL AND f.value ->> 'lost' IS DISTINCT FROM 'true' THEN w.first_record END AS failing_record,
       f.value -> 'timer' ->> 1 AS failing_timer, f.value ->> 'traceback' AS traceback,
       EXISTS (SELECT FROM mill.releases AS r WHERE r.interval_id = p.interval_id AND r.key = w.key
                  AND r.ticket = (f.value ->> 'ticket')::bigint) AS requested,
       p.interval_id, (f.value ->> 'ticket')::bigint AS ticket
  FROM (SELECT interval_id, key, count(*) FILTER (WHERE namespace <> 'key') AS records,
               min(fire_at) FILTER (WHERE namespace <> 'key' AND fire_at < 4611686018427387904) AS holds_at,
               (array_agg(value -> 'record' ORDER BY subkey) FILTER (WHERE namespace <> 'key'))[1]::jsonb AS first_record
          FROM mill.entries WHERE kind = 'parked' GROUP BY interval_id, key) AS w
  JOIN (SELECT interval_id, key, value FROM mill.entries WHERE kind = 'parked' AND namespace = 'key') AS f
    USING (interval_id, key)
  JOIN mill.places AS p USING (interval_id);

CREATE FUNCTION mill.ask_release(p_graph text, p_computation text, p_key text, p_discards boolean) RETURNS bigint
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    WITH asked AS (
        INSERT INTO mill.releases (interval_id, key, ticket, discards)
        SELECT k.interval_id, k.key, k.ticket, p_discards
          FROM millpy.parked AS k
         WHERE k.graph = p_graph AND k.computation = p_computation AND NOT k.requested
           AND (p_key IS NULL OR k.key = p_key OR k.key = to_json(p_key)::text)
        RETURNING interval_id
    ), told AS (
        SELECT pg_notify('millpy_' || graph_id, 'release')
          FROM (SELECT DISTINCT i.graph_id FROM asked JOIN mill.intervals AS i USING (interval_id)) AS graphs
    )
    SELECT count(*) FROM asked WHERE (SELECT count(*) FROM told) >= 0
$$;

-- Lets a parked key go on, by its key as text or JSON, or all of a computation; how many keys were asked to.
CREATE FUNCTION millpy.release_parked(p_graph text, p_computation text, p_key text DEFAULT NULL) RETURNS bigint
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$ SELECT mill.ask_release(p_graph, p_computation, p_key, false) $$;

-- The same without what it stopped at, which becomes a dead letter.
CREATE FUNCTION millpy.discard_parked(p_graph text, p_computation text, p_key text DEFAULT NULL) RETURNS bigint
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$ SELECT mill.ask_release(p_graph, p_computation, p_key, true) $$;

-- Functions are for whom they are granted to. What everybody may call only reckons: the views beside result tables have
-- the rights of whoever asks.
REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA mill, millpy FROM PUBLIC;
GRANT EXECUTE ON FUNCTION mill.moment(bigint), mill.instant(timestamptz), mill.readable(bytea) TO PUBLIC;

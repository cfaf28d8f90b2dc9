-- Every function pins its search_path, or has a body that is parsed at creation (RETURN). Users call the functions
-- from their own sessions, where the path may lead to another operator or function of the same name.

-- NULL behind the year 9999. A number of µs times an interval would be rounded to a double: hours and seconds are exact.
-- With nothing in it that depends on the session's time zone, as timestamptz + interval does, it is inlined into the
-- queries that call it for each row, which makes them ten times as fast.
CREATE FUNCTION mill.moment(p_instant bigint) RETURNS timestamptz LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN p_instant <= -4611686018427387904 THEN timestamptz '-infinity'
            WHEN p_instant >= 4611686018427387904 THEN timestamptz 'infinity'
            WHEN p_instant BETWEEN -200000000000000000 AND 253402300799999999
            THEN (timestamp 'epoch' + make_interval(hours => (p_instant / 3600000000)::integer,
                                                    secs => (p_instant % 3600000000) / 1e6::double precision))
                 AT TIME ZONE 'UTC'
       END;

-- A time in µs for operators: 00:00:30, 1 day 02:00:00.5.
CREATE FUNCTION mill.duration(p_us bigint) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN justify_hours(make_interval(secs => round(p_us / 1e6, 1)::double precision))::text;

CREATE FUNCTION mill.instant(p_moment timestamptz) RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN p_moment = timestamptz '-infinity' THEN -4611686018427387904
            WHEN p_moment = timestamptz 'infinity' THEN 4611686018427387904
            ELSE (extract(epoch FROM p_moment AT TIME ZONE 'UTC') * 1000000)::bigint
       END;

-- Who requests something: the name that the API has set for its transaction, otherwise the login. Logins that are not
-- those of workers, as the API's is, cannot take another name.
CREATE FUNCTION mill.actor() RETURNS text LANGUAGE sql STABLE
RETURN coalesce(CASE WHEN to_regrole('millpy_worker') IS NULL
                       OR pg_has_role(session_user, to_regrole('millpy_worker')::oid, 'MEMBER')
                     THEN nullif(current_setting('millpy.actor', true), '') END, session_user::text);

-- Tells whether a lease has not expired, on the server's clock. A deadline further away than any lease was set before
-- the clock was set back; such a lease would keep a dead worker's intervals from the others until the clock catches up,
-- so it does not count. No lease is false.
CREATE FUNCTION mill.alive(p_deadline timestamptz, p_lease_s double precision) RETURNS boolean LANGUAGE sql VOLATILE
RETURN coalesce(p_deadline > clock_timestamp()
                AND p_deadline <= clock_timestamp() + 2 * make_interval(secs => p_lease_s), false);

-- Tells whether a worker's lease has not expired.
CREATE FUNCTION mill.alive(p_worker uuid) RETURNS boolean LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (SELECT FROM mill.workers AS w WHERE w.worker_id = p_worker AND mill.alive(w.lease_deadline, w.lease_s))
$$;

-- Raises MW008 unless each statement sees what was committed before it. At a higher isolation level, a statement that
-- has waited for a lock would read rows as they were before the wait.
CREATE FUNCTION mill.check_isolation() RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'the transaction is %, but must be READ COMMITTED', upper(current_setting('transaction_isolation'))
              USING ERRCODE = 'MW008';
    END IF;
END $$;

-- The fence: advances the checkpoint headers, which holds the grants until this transaction ends (I1, I2). A row does not match
-- when its sequencer is newer, when this bundle is committed already, when it runs another version of the graph, or
-- when one of its watermarks would regress (I5). The function then raises, because the statements behind it in the
-- pipeline have been sent already:
--   MW001 stale grants (DETAIL: their ids)    MW002 another graph version runs (DETAIL: which)
--   MW005 a watermark would move back (DETAIL: ids)
CREATE FUNCTION mill.hold_grants(
    p_graph_version integer, p_intervals bigint[], p_sequencers bigint[], p_bundles bigint[],
    p_input_watermarks bigint[], p_low_watermarks bigint[], p_oldest_works bigint[], p_floors bigint[]
) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    held integer;
BEGIN
    PERFORM mill.check_isolation();
    IF cardinality(p_intervals) > 1 THEN
        PERFORM FROM mill.intervals WHERE interval_id = ANY (p_intervals) ORDER BY interval_id FOR NO KEY UPDATE;
    END IF;
    UPDATE mill.intervals AS i
       SET bundle = e.bundle,
           input_watermark = e.input_watermark,
           low_watermark = e.low_watermark,
           oldest_work = e.oldest_work,
           -- The floor may fall, so that the effect of a wrong clock does not last. Injectors have no floor.
           processing_floor = coalesce(nullif(e.processing_floor, -4611686018427387904), i.processing_floor)
      FROM unnest(p_intervals, p_sequencers, p_bundles, p_input_watermarks, p_low_watermarks, p_oldest_works, p_floors)
        AS e (interval_id, sequencer, bundle, input_watermark, low_watermark, oldest_work, processing_floor)
     WHERE i.interval_id = e.interval_id
       AND i.sequencer = e.sequencer
       AND i.bundle = e.bundle - 1
       AND i.low_watermark <= e.low_watermark
       AND i.input_watermark <= e.input_watermark
       AND i.graph_version = p_graph_version;
    GET DIAGNOSTICS held = ROW_COUNT;
    IF held <> cardinality(p_intervals) THEN
        PERFORM mill.refuse(p_graph_version, p_intervals, p_sequencers, p_bundles, p_input_watermarks, p_low_watermarks);
    END IF;
END $$;

-- Raises MW003 unless the slots, in the order of the rings' names, are the current ones. It runs after the last INSERT
-- into a ring: a writer holds a lock on the slot's table from its INSERT to COMMIT, and emptying a slot takes a lock
-- that waits for it. So a slot that is current here, in a statement after the INSERT, has not been emptied since, and
-- is not emptied before this transaction ends. Only roles that may write to a slot can lock it against others; readers
-- cannot.
CREATE FUNCTION mill.check_slots(p_slots integer[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_slots <> (SELECT array_agg(slot::integer ORDER BY ring) FROM mill.epochs WHERE state = 'current') THEN
        RAISE EXCEPTION 'slots % are no longer current', p_slots USING ERRCODE = 'MW003';
    END IF;
END $$;

-- Raises the error that says why the fence refused a commit. The caller has locked the headers.
CREATE FUNCTION mill.refuse(
    p_graph_version integer, p_intervals bigint[], p_sequencers bigint[], p_bundles bigint[],
    p_input_watermarks bigint[], p_low_watermarks bigint[]
) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    running integer;
    stale bigint[];
    regressed bigint[];
BEGIN
    SELECT min(graph_version) FILTER (WHERE graph_version <> p_graph_version) INTO running
      FROM mill.intervals WHERE interval_id = ANY (p_intervals);
    IF running IS NOT NULL THEN
        RAISE EXCEPTION 'graph version % runs, not %', running, p_graph_version
              USING ERRCODE = 'MW002', DETAIL = running::text;
    END IF;
    -- The fence has advanced the headers that matched, so these have the new bundle number now.
    SELECT array_agg(e.interval_id ORDER BY e.interval_id)
             FILTER (WHERE i.interval_id IS NULL OR i.sequencer <> e.sequencer
                        OR i.bundle NOT IN (e.bundle - 1, e.bundle)
                        OR (i.bundle = e.bundle AND i.xmin <> pg_current_xact_id()::xid)),
           array_agg(e.interval_id ORDER BY e.interval_id)
             FILTER (WHERE i.sequencer = e.sequencer AND i.bundle = e.bundle - 1
                       AND (i.input_watermark > e.input_watermark OR i.low_watermark > e.low_watermark))
      INTO stale, regressed
      FROM unnest(p_intervals, p_sequencers, p_bundles, p_input_watermarks, p_low_watermarks)
        AS e (interval_id, sequencer, bundle, input_watermark, low_watermark)
      LEFT JOIN mill.intervals AS i ON i.interval_id = e.interval_id;
    IF stale IS NOT NULL THEN
        RAISE EXCEPTION 'stale grants %', stale USING ERRCODE = 'MW001', DETAIL = array_to_string(stale, ',');
    ELSIF regressed IS NOT NULL THEN
        RAISE EXCEPTION 'a watermark of intervals % would move back', regressed
              USING ERRCODE = 'MW005', DETAIL = array_to_string(regressed, ',');
    END IF;
    RAISE EXCEPTION 'the fence did not match all of %', p_intervals
          USING ERRCODE = 'MW001', DETAIL = array_to_string(p_intervals, ',');
END $$;

-- Raises when panes do not follow the stored rows (I7): MW004 when the sending interval wrote at least one of these
-- rows, MW009 when the user wrote all of them.
CREATE FUNCTION mill.check_panes(p_table text, p_own bigint, p_all bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_own > 0 THEN
        RAISE EXCEPTION '% panes do not follow the pane stored in %', p_own, p_table
              USING ERRCODE = 'MW004', DETAIL = p_table;
    ELSIF p_all > 0 THEN
        RAISE EXCEPTION 'another row has the key of a window in %', p_table USING ERRCODE = 'MW009', DETAIL = p_table;
    END IF;
END $$;

-- Tells whether a user's trigger may keep single rows from being written.
CREATE FUNCTION mill.has_filter(p_table regclass) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (SELECT FROM pg_trigger AS t
                    WHERE t.tgrelid = p_table AND NOT t.tgisinternal AND t.tgenabled <> 'D' AND t.tgtype & 3 = 3)
$$;

-- Raises MW006 unless every cursor moved forward, and not past its producer: anything else breaks I3.
CREATE FUNCTION mill.check_cursors(p_written bigint, p_sent bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_written <> p_sent THEN
        RAISE EXCEPTION '% of % cursors are missing, or would move back or past their producer', p_sent - p_written, p_sent
              USING ERRCODE = 'MW006';
    END IF;
END $$;

-- Raises MW006 unless the messages of each bundle follow those before them: a gap would lose messages.
CREATE FUNCTION mill.check_outbox(p_wrong bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_wrong > 0 THEN
        RAISE EXCEPTION '% of the outboxes have another position than the sent messages', p_wrong USING ERRCODE = 'MW006';
    END IF;
END $$;

-- Tells whether the text of a time names its zone: then it means the same in every zone of a session.
CREATE FUNCTION mill.has_zone(p_time text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET TimeZone = 'UTC' AS $$
DECLARE
    in_utc CONSTANT timestamptz := p_time::timestamptz;
BEGIN
    PERFORM set_config('TimeZone', 'Etc/GMT+5', true);
    RETURN p_time::timestamptz = in_utc;
END $$;

-- What an event says of a correction: the row, who changed it, why, and the columns that are different, before and after.
CREATE FUNCTION mill.correction(p_made mill.corrections) RETURNS jsonb LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp AS $$
    SELECT jsonb_strip_nulls(jsonb_build_object(
               'table', p_made.table_name, 'key', p_made.key::jsonb, 'window_start', mill.moment(p_made.window_start),
               'window_end', mill.moment(p_made.window_end), 'by', p_made.requested_by, 'why', p_made.why,
               'late_record_id', p_made.late_record_id, 'dead_letter_id', p_made.dead_letter_id, 'recomputed', nullif(p_made.recomputed, false)))
           || jsonb_build_object('old', jsonb_object_agg(name, p_made.old_row -> name) FILTER (WHERE p_made.old_row ? name),
                                 'new', jsonb_object_agg(name, p_made.new_row -> name) FILTER (WHERE p_made.new_row ? name))
      FROM jsonb_object_keys(coalesce(p_made.old_row, '{}') || coalesce(p_made.new_row, '{}')) AS name
     WHERE p_made.old_row -> name IS DISTINCT FROM p_made.new_row -> name
       AND name NOT IN ('pane_index', 'pane_timing', 'late_count', 'emitted_at', 'interval_id', 'bundle')
$$;

-- Raises MW007 unless every request still exists: an operator may have withdrawn one in the meantime.
CREATE FUNCTION mill.check_settled(p_settled bigint, p_sent bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_settled <> p_sent THEN
        RAISE EXCEPTION '% of % replayed records have been withdrawn', p_sent - p_settled, p_sent
              USING ERRCODE = 'MW007';
    END IF;
END $$;

-- The last step of folding a piece: locks the header for an instant, and raises MW001 when the grant is stale.
CREATE FUNCTION mill.end_fold(p_interval bigint, p_sequencer bigint, p_folded bigint, p_bundle bigint)
RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE mill.intervals SET folded_bundle = p_bundle
     WHERE interval_id = p_interval AND sequencer = p_sequencer AND folded_bundle = p_folded;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'stale grants {%}', p_interval USING ERRCODE = 'MW001', DETAIL = p_interval::text;
    END IF;
END $$;

-- Tells whether a filled slot is no longer needed. Once true, this stays true, because filled slots take no writes,
-- and cursors, folded bundles and dedupe clocks only move forward. Uses index probes only; of dedupe runs, it reads those
-- of the slot, the newest first, until one has not expired: they expire about in their order.
CREATE FUNCTION mill.unneeded(p_ring text, p_slot integer) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_ring = 'segments' THEN
        RETURN NOT EXISTS (
            SELECT FROM mill.subscriptions AS u
              JOIN mill.streams AS t ON t.stream_id = u.stream_id
              JOIN mill.intervals AS p ON p.computation_id = t.producer_id
              JOIN mill.intervals AS c ON c.computation_id = u.consumer_id
              JOIN mill.cursors AS k ON k.consumer = c.interval_id AND k.producer = p.interval_id
             WHERE EXISTS (SELECT FROM mill.segments AS s
                            WHERE s.slot = p_slot AND s.subscription_id = u.subscription_id
                              AND s.producer = p.interval_id AND s.seq > k.seq));
    ELSIF p_ring = 'deltas' THEN
        RETURN NOT EXISTS (
            SELECT FROM mill.intervals AS i
             WHERE EXISTS (SELECT FROM mill.deltas AS d
                            WHERE d.slot = p_slot AND d.interval_id = i.interval_id AND d.bundle > i.folded_bundle));
    END IF;
    RETURN NOT EXISTS (
        SELECT FROM (SELECT i.interval_id FROM mill.intervals AS i
                      CROSS JOIN LATERAL (SELECT FROM mill.dedupe_runs AS r
                                           WHERE r.slot = p_slot AND r.interval_id = i.interval_id
                                           ORDER BY r.bundle LIMIT 1) AS first
                     OFFSET 0) AS held  -- before more is read of them: most intervals have none
         CROSS JOIN LATERAL (
               SELECT r.clock FROM mill.dedupe_runs AS r WHERE r.interval_id = held.interval_id
                ORDER BY r.bundle DESC LIMIT 1) AS latest
         CROSS JOIN LATERAL (
               SELECT max(r.bundle) AS bundle FROM mill.dedupe_runs AS r
                WHERE r.interval_id = held.interval_id AND r.whole) AS whole
         CROSS JOIN LATERAL (
               SELECT FROM mill.dedupe_runs AS r
                WHERE r.slot = p_slot AND r.interval_id = held.interval_id AND r.expires_at >= latest.clock
                  AND r.bundle >= coalesce(whole.bundle, 0)
                ORDER BY r.bundle DESC LIMIT 1) AS needed);
END $$;

-- Begins a new epoch when the current one is old or large and a slot is free. Returns whether it did.
-- Transactions in flight that write to the old slot can still end: they lock its table until then.
-- Runs with the owner's rights, like free_slot: workers may neither write to the epochs nor empty a slot in use.
CREATE FUNCTION mill.turn_ring(p_ring text, p_epoch_s double precision, p_epoch_bytes bigint)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    turned record;
    next_slot smallint;
    size bigint;
BEGIN
    PERFORM mill.check_isolation();
    SELECT * INTO turned FROM mill.epochs WHERE ring = p_ring AND state = 'current' FOR UPDATE SKIP LOCKED;
    IF turned IS NULL THEN
        RETURN false;
    END IF;
    size := pg_table_size(format('mill.%I', p_ring || '_' || turned.slot)::regclass);
    -- An empty table with TOAST has 8 kB: the page of its TOAST index.
    IF size <= 8192 OR (size < p_epoch_bytes
                        AND turned.started_at > clock_timestamp() - make_interval(secs => p_epoch_s)
                        AND turned.started_at <= clock_timestamp()) THEN
        RETURN false;
    END IF;
    SELECT slot INTO next_slot FROM mill.epochs WHERE ring = p_ring AND state = 'free'
     ORDER BY (slot - turned.slot + 16) % 16 LIMIT 1;
    IF next_slot IS NULL THEN
        RETURN false;
    END IF;
    UPDATE mill.epochs SET state = 'filled' WHERE ring = p_ring AND slot = turned.slot;
    UPDATE mill.epochs SET state = 'current', started_at = clock_timestamp() WHERE ring = p_ring AND slot = next_slot;
    RETURN true;
END $$;

-- Empties a filled slot that is no longer needed. Returns whether the slot is free now. LOCK waits for writers of the
-- slot, then TRUNCATE for readers. The caller sets a lock_timeout of a few milliseconds, because other writers and
-- readers queue behind this wait.
CREATE FUNCTION mill.free_slot(p_ring text, p_slot integer) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM mill.check_isolation();
    PERFORM FROM mill.epochs WHERE ring = p_ring AND slot = p_slot;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    EXECUTE format('LOCK TABLE mill.%I IN EXCLUSIVE MODE', p_ring || '_' || p_slot);
    PERFORM FROM mill.epochs WHERE ring = p_ring AND slot = p_slot AND state = 'filled' FOR UPDATE;
    IF NOT FOUND OR NOT mill.unneeded(p_ring, p_slot) THEN
        RETURN false;
    END IF;
    EXECUTE format('TRUNCATE mill.%I', p_ring || '_' || p_slot);
    UPDATE mill.epochs SET state = 'free', started_at = NULL WHERE ring = p_ring AND slot = p_slot;
    RETURN true;
END $$;

-- The bound of a range of times, as ALTER TABLE takes it.
CREATE FUNCTION mill.partition_bound(p_instant bigint) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN p_instant <= -4611686018427387904 THEN 'MINVALUE'
            WHEN p_instant >= 4611686018427387904 THEN 'MAXVALUE'
            ELSE quote_literal(to_char(mill.moment(p_instant) AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US') || '+00')
       END;

-- Makes the partitions that rows of these times need, in a result table with a retention and in its history. Returns
-- the ranges of all its partitions. A call makes at most 16, so that its locks stay few: call it again for the rest.
--
-- No partition takes a lock that a reader or a commit waits for: a partition is attached, not created in place, and
-- there is no default partition, which ATTACH would have to lock and read. So every time has a partition of its own:
--   usual       a multiple of partition_us, cut where another partition is
--   before 1970, from 2200 on: one partition each
--   beyond 128 partitions (clocks that are far off): the whole gap between two partitions, or 64 times the length
--   behind the last one; beyond 256, all the time up to the next one. So their number is bounded.
-- Runs with the owner's rights, like turn_ring: workers create no tables.
CREATE FUNCTION mill.make_partitions(p_table_id integer, p_times bigint[])
RETURNS TABLE (range_lo bigint, range_hi bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    first_time CONSTANT bigint := 0;
    last_time CONSTANT bigint := 7258118400000000;
    parent record;
    wanted bigint;
    lo bigint;
    hi bigint;
    below bigint;
    above bigint;
    held bigint;
    made integer := 0;
    parts text;
    ending text;
    grantee text;
BEGIN
    PERFORM mill.check_isolation();
    -- The key of the graph's row keeps a switch from giving the table's name to another generation.
    SELECT g.name AS schema, t.name, t.partition_us, t.kind = 'windowed' AS windowed, t.history <> '' AS has_history
      INTO parent FROM mill.result_tables AS t JOIN mill.graphs AS g USING (graph_id)
     WHERE t.table_id = p_table_id AND t.partition_us IS NOT NULL FOR KEY SHARE OF g;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    EXECUTE format('LOCK TABLE ONLY %I.%I IN SHARE UPDATE EXCLUSIVE MODE', parent.schema, parent.name);
    -- A user may have dropped or detached some.
    DELETE FROM mill.partitions AS p
     WHERE p.table_id = p_table_id
       AND NOT EXISTS (SELECT FROM pg_inherits AS i WHERE i.inhrelid = to_regclass(format('mill.%I', p.name))
                          AND i.inhparent = to_regclass(format('%I.%I', parent.schema, parent.name)));
    FOR wanted IN SELECT DISTINCT t.at FROM unnest(p_times) AS t (at) WHERE t.at IS NOT NULL ORDER BY 1 LOOP
        CONTINUE WHEN EXISTS (SELECT FROM mill.partitions AS p
                               WHERE p.table_id = p_table_id AND p.range_lo <= wanted AND wanted < p.range_hi);
        EXIT WHEN made = 16;
        SELECT count(*) INTO held FROM mill.partitions AS p WHERE p.table_id = p_table_id;
        IF made = 0 AND held >= 48 THEN
            PERFORM mill.drop_partitions(p_table_id);
            SELECT count(*) INTO held FROM mill.partitions AS p WHERE p.table_id = p_table_id;
        END IF;
        SELECT max(p.range_hi) FILTER (WHERE p.range_hi <= wanted), min(p.range_lo) FILTER (WHERE p.range_lo > wanted)
          INTO below, above FROM mill.partitions AS p WHERE p.table_id = p_table_id;
        IF wanted < first_time THEN
            lo := -4611686018427387904;
            hi := first_time;
        ELSIF wanted >= last_time THEN
            lo := last_time;
            hi := 9223372036854775807;
        ELSE
            lo := wanted - wanted % parent.partition_us;
            hi := lo + parent.partition_us;
            IF held >= 128 THEN
                lo := first_time;
                hi := CASE WHEN above IS NULL AND held < 256 THEN hi + 63 * parent.partition_us ELSE last_time END;
            END IF;
            lo := greatest(lo, below, first_time);
            hi := least(hi, above, last_time);
        END IF;
        parts := format('result_%s_%s', p_table_id,
                        CASE WHEN lo < first_time THEN 'past'
                             ELSE to_char(mill.moment(lo) AT TIME ZONE 'UTC', 'YYYYMMDD_HH24') END);
        -- A user may have detached a partition and kept it.
        WHILE to_regclass(format('mill.%I', parts)) IS NOT NULL
           OR to_regclass(format('mill.%I', parts || '_history')) IS NOT NULL LOOP
            parts := parts || 'x';
        END LOOP;
        FOREACH ending IN ARRAY CASE WHEN parent.has_history THEN ARRAY['', '_history'] ELSE ARRAY[''] END LOOP
            EXECUTE format('CREATE TABLE mill.%I (LIKE %I.%I INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING GENERATED'
                           ' INCLUDING STORAGE INCLUDING COMPRESSION) WITH (fillfactor = 90)',
                           parts || ending, parent.schema, parent.name || ending);
            EXECUTE format('ALTER TABLE %I.%I ATTACH PARTITION mill.%I FOR VALUES FROM (%s) TO (%s)',
                           parent.schema, parent.name || ending, parts || ending, mill.partition_bound(lo),
                           mill.partition_bound(hi));
            EXECUTE format('COMMENT ON TABLE mill.%I IS %L', parts || ending,
                           format('Partition of %I.%I: from %s to %s.', parent.schema, parent.name || ending,
                                  mill.moment(lo), mill.moment(hi)));
            -- Default privileges would let people read around the row-level security of the result table.
            FOR grantee IN SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END
                             FROM pg_class AS c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
                            WHERE c.oid = to_regclass(format('mill.%I', parts || ending)) AND a.grantee <> c.relowner LOOP
                EXECUTE format('REVOKE ALL ON mill.%I FROM %s CASCADE', parts || ending, grantee);
            END LOOP;
        END LOOP;
        INSERT INTO mill.partitions (table_id, range_lo, range_hi, name) VALUES (p_table_id, lo, hi, parts);
        made := made + 1;
    END LOOP;
    RETURN QUERY SELECT p.range_lo, p.range_hi FROM mill.partitions AS p WHERE p.table_id = p_table_id ORDER BY 1;
END $$;

-- Drops the partitions of a result table, and of its history, whose rows are all older than its retention: at most 16.
-- `dropped` is their number; `kept_because` says why others could not be dropped, and is empty otherwise. The 16 oldest
-- are tried, and then up to 16 others by chance, so that those which stay hold up no others for ever.
--
-- Age is counted from the input watermark of the table's computation. A window takes records until its allowed lateness
-- has passed, so it is never dropped before. After the end of the input there is no watermark: age is then counted from
-- the beginning of the newest partition with rows, but not from the future.
-- DROP waits at most 20 ms for readers and commits, because others queue behind this wait.
-- Only what is attached is dropped: who has detached a partition keeps it. A partition with rows to which a foreign key
-- of a user refers stays: DETACH finds these rows, while DROP would refuse every partition of such a table.
CREATE FUNCTION mill.drop_partitions(p_table_id integer, OUT dropped integer, OUT kept_because text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '20ms' AS $$
DECLARE
    parent record;
    part record;
    reference bigint;
    is_used boolean;
    gone_rows bigint := 0;
    gone_bytes bigint := 0;
    gone_from bigint;
    gone_to bigint;
BEGIN
    dropped := 0;
    kept_because := '';
    PERFORM mill.check_isolation();
    SELECT t.graph_id, g.name AS schema, t.name, t.computation_id, t.history <> '' AS has_history,
           greatest(t.retention_us, t.allowed_lateness_us) AS kept_us
      INTO parent FROM mill.result_tables AS t JOIN mill.graphs AS g USING (graph_id)
     WHERE t.table_id = p_table_id AND t.retention_us IS NOT NULL FOR KEY SHARE OF g;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT min(i.input_watermark) INTO reference FROM mill.intervals AS i WHERE i.computation_id = parent.computation_id;
    IF reference >= 4611686018427387904 THEN
        reference := NULL;
        FOR part IN SELECT p.range_lo, p.name FROM mill.partitions AS p
                     WHERE p.table_id = p_table_id AND p.range_lo BETWEEN 0 AND mill.instant(now()) ORDER BY 1 DESC LOOP
            CONTINUE WHEN to_regclass(format('mill.%I', part.name)) IS NULL;
            EXECUTE format('SELECT EXISTS (SELECT FROM mill.%I)', part.name) INTO is_used;
            IF is_used THEN
                reference := part.range_lo;
                EXIT;
            END IF;
        END LOOP;
    END IF;
    FOR part IN
        SELECT p.range_lo, p.range_hi, p.name, c.reltuples,
               CASE WHEN parent.has_history THEN ARRAY[p.name, p.name || '_history'] ELSE ARRAY[p.name] END AS relations
          FROM (SELECT e.*, row_number() OVER (ORDER BY e.range_lo) AS place FROM mill.partitions AS e
                 WHERE e.table_id = p_table_id AND e.range_hi <= reference - parent.kept_us) AS p
          LEFT JOIN pg_class AS c ON c.oid = to_regclass(format('mill.%I', p.name))
         ORDER BY CASE WHEN p.place <= 16 THEN p.place ELSE 17 + random() END LIMIT 32
    LOOP
        EXIT WHEN dropped = 16;
        DECLARE
            held bigint := 0;
            size bigint;
            relation text;
            whole regclass;
            wrong_schema text;
            wrong_table text;
            wrong_constraint text;
        BEGIN
            SELECT coalesce(sum(pg_total_relation_size(to_regclass(format('mill.%I', r.name)))), 0) INTO size
              FROM unnest(part.relations) AS r (name);
            IF part.reltuples IS NULL THEN
                held := 0;  -- a user has dropped it
            ELSIF part.reltuples < 0 OR size < 8000000 THEN
                EXECUTE format('SELECT count(*) FROM mill.%I', part.name) INTO held;
            ELSE
                held := part.reltuples;  -- a scan would hold the locks for longer
            END IF;
            EXECUTE format('LOCK TABLE ONLY %I.%I IN ACCESS EXCLUSIVE MODE', parent.schema, parent.name);
            UPDATE mill.result_tables AS t SET dropped_to = greatest(t.dropped_to, part.range_hi)
             WHERE t.table_id = p_table_id AND part.range_hi < 9223372036854775807;
            FOREACH relation IN ARRAY part.relations LOOP
                whole := to_regclass(format('%I.%I', parent.schema, parent.name || substr(relation, length(part.name) + 1)));
                CONTINUE WHEN NOT EXISTS (SELECT FROM pg_inherits AS i
                                           WHERE i.inhrelid = to_regclass(format('mill.%I', relation))
                                             AND i.inhparent = whole AND NOT i.inhdetachpending);
                IF EXISTS (SELECT FROM pg_constraint AS c WHERE c.contype = 'f' AND c.confrelid = whole) THEN
                    EXECUTE format('ALTER TABLE %s DETACH PARTITION mill.%I', whole, relation);
                END IF;
                EXECUTE format('DROP TABLE mill.%I', relation);
            END LOOP;
            DELETE FROM mill.partitions AS p WHERE p.table_id = p_table_id AND p.range_lo = part.range_lo;
            dropped := dropped + 1;
            gone_rows := gone_rows + held;
            gone_bytes := gone_bytes + size;
            gone_from := least(gone_from, part.range_lo);
            gone_to := greatest(gone_to, part.range_hi);
        EXCEPTION WHEN lock_not_available THEN
            kept_because := 'a transaction reads or writes the table';
            EXIT;
        WHEN foreign_key_violation THEN
            GET STACKED DIAGNOSTICS wrong_schema := SCHEMA_NAME, wrong_table := TABLE_NAME,
                                    wrong_constraint := CONSTRAINT_NAME;
            -- The constraint of the partition has a name of its own; the user knows that of the table.
            WITH RECURSIVE up AS (
                SELECT c.conname, c.conparentid FROM pg_constraint AS c
                 WHERE c.conrelid = to_regclass(format('%I.%I', wrong_schema, wrong_table))
                   AND c.conname = wrong_constraint
                UNION ALL
                SELECT c.conname, c.conparentid FROM pg_constraint AS c JOIN up ON c.oid = up.conparentid
            )
            SELECT coalesce(min(conname) FILTER (WHERE conparentid = 0), wrong_constraint) INTO wrong_constraint FROM up;
            kept_because := format('rows of %s.%s refer to them by the foreign key %s', wrong_schema, wrong_table,
                                   wrong_constraint);
        WHEN dependent_objects_still_exist OR insufficient_privilege OR undefined_table
          OR object_not_in_prerequisite_state THEN
            kept_because := SQLERRM;
        END;
    END LOOP;
    IF dropped > 0 THEN
        DELETE FROM mill.corrected_windows AS w
         WHERE w.graph_id = parent.graph_id AND w.table_name = parent.name
           AND w.window_end < (SELECT t.dropped_to FROM mill.result_tables AS t WHERE t.table_id = p_table_id);
        INSERT INTO mill.events (graph_id, kind, detail)
        VALUES (parent.graph_id, 'rows_expired',
                jsonb_build_object('table', parent.name, 'partitions', dropped, 'from', mill.moment(gone_from),
                                   'to', mill.moment(gone_to), 'rows', gone_rows, 'bytes', gone_bytes));
    END IF;
END $$;

-- Tells whether a source has read, and committed, an injected record.
CREATE FUNCTION mill.has_read(p_reader mill.injection_readers, p_number bigint, p_xid xid8) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN p_number <= (p_reader).read_number AND NOT p_xid::text::bigint <@ (p_reader).open_xids
       AND NOT (p_number > (p_reader).rest_after AND p_xid::text::bigint <@ (p_reader).rest_xids);

-- Deletes the injected records that no source will read any more: when a source is gone.
CREATE FUNCTION mill.forget_injected() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM mill.injected_records AS i
     WHERE NOT EXISTS (SELECT FROM mill.injection_readers AS r
                        WHERE r.stream = i.stream AND NOT mill.has_read(r, i.number, i.xid));
    RETURN NULL;
END $$;
CREATE TRIGGER forget_injected AFTER DELETE ON mill.injection_readers
   FOR EACH STATEMENT EXECUTE FUNCTION mill.forget_injected();
